"""Starts applications for the measurements, each on a free port of the loopback, and ends them whatever happens."""

import contextlib
import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from tests.benchmarks.children import ROOT, Child
from tests.benchmarks.generator import Plan
from tests.benchmarks.processes import ProcessTable, Shares, shares_between

Front = Literal["shipped", "haproxy", "python"]

START_S = 300.0
STOP_S = 60.0


class ServiceError(Exception):
    """The application didn't start, or gave other answers than a measurement may have."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load and what came of it."""

    connections: int | None
    rate: float | None
    requests_per_s: float
    texts_per_s: float
    latency_ms: dict[str, dict[str, float]]
    statuses: dict[str, int]
    shares: Shares
    late_p99_ms: float = 0.0
    waited: int = 0
    unanswered: int = 0
    memory_bytes: list[dict[str, int]] = field(default_factory=list)

    @property
    def p50_ms(self) -> float:
        """Of the answers with status 200."""
        return self.latency_ms["200"]["p50"]

    @property
    def p99_ms(self) -> float:
        """Of the answers with status 200."""
        return self.latency_ms["200"]["p99"]


class Served:
    """A running application."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.port = port
        self.ready_s = 0.0
        self._process = process
        self._log = log
        self._table: ProcessTable | None = None
        self._sent = 0

    @property
    def processes(self) -> ProcessTable:
        """What it consists of, as of the last load."""
        if self._table is None:
            self._table = ProcessTable(self._process.pid, _haproxies(self.port))
        return self._table

    @property
    def front(self) -> str:
        """Which proxy is in front, as its processes tell."""
        return "haproxy" if "proxy's manager" in self.processes.roles.values() else "python"

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = 120.0) -> Any:
        """The JSON of an answer; `ServiceError` with the words of a refusal."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ServiceError(f"{method} {path}: {error.code} {error.read()[:300]!r}") from error

    def label_set(self, labels: list[str]) -> str:
        """The id of a label set, its labels encoded."""
        return str(self.request("POST", "/v1/label-sets", {"labels": labels})["id"])

    def load(self, texts: list[str], extra: dict[str, Any], *, size: int = 1, path: str = "/v1/classify",
             connections: int | None = None, rate: float | None = None, warm_s: float = 1.0, window_s: float = 5.0,
             refusals: bool = False, watch_memory: bool = False) -> Load:  # fmt: skip
        """One load by a process of its own, with what everybody used of the processors meanwhile.

        Raises `ServiceError` when a request failed; with `refusals` 429 and 504 are answers like others.
        """
        plan = Plan(self.port, path, texts, size, extra, connections, rate, warm_s, window_s, start=self._sent)
        self._table = None  # replicas may have come and gone
        memory = [self.processes.resident_bytes()]
        with Child("tests.benchmarks.generator") as generator:
            generator.send(asdict(plan))
            _expect(generator.receive(), "begin")
            before = self.processes.cpu_times()
            if watch_memory:
                memory += self._watch(window_s)
            _expect(generator.receive(), "end")
            after = self.processes.cpu_times()
            outcome = generator.receive()
        memory.append(self.processes.resident_bytes())
        answered = sum(n for status, n in outcome["statuses"].items() if status == "200")
        self._sent += sum(outcome["statuses"].values())
        bad = set(outcome["statuses"]) - ({"200", "429", "504"} if refusals else {"200"})
        if bad or not answered or (outcome["unanswered"] and not refusals):
            raise ServiceError(f"requests failed ({connections=}, {rate=}): {outcome}")
        elapsed_s = outcome["elapsed_s"]
        shares = shares_between(
            before, after, self.processes.roles, elapsed_s, psutil.cpu_count() or 1, outcome["cpu_s"]
        )
        return Load(
            connections, rate, answered / elapsed_s, size * answered / elapsed_s, outcome["latency_ms"],
            outcome["statuses"], shares, outcome["late_p99_ms"], outcome["waited"], outcome["unanswered"], memory,
        )  # fmt: skip

    def _watch(self, window_s: float) -> list[dict[str, int]]:
        """Memory by role, once a second until shortly before the window ends."""
        seen, until = [], time.monotonic() + window_s - 0.5
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            seen.append(self.processes.resident_bytes())
        return seen

    def metrics(self) -> str:
        """What Ray's metrics agent of this machine tells Prometheus; empty where none answers."""
        found = [""]
        for pid in self.processes.roles:
            with contextlib.suppress(psutil.Error):
                for listening in psutil.Process(pid).net_connections("tcp"):
                    if listening.status == psutil.CONN_LISTEN and listening.laddr.port != self.port:
                        found.append(_get(listening.laddr.ip, listening.laddr.port, "/metrics"))
        return max(found, key=lambda text: text.count("\nray_"))  # other parts of Ray have small ones of their own

    def wait_until_ready(self, path: str) -> None:
        """Returns once the application says that it is ready; `ServiceError` with its log when it ended instead."""
        started = time.monotonic()
        while self._process.poll() is None and time.monotonic() - started < START_S:
            if _get("127.0.0.1", self.port, path):
                self.ready_s = time.monotonic() - started
                return
            time.sleep(0.2)
        raise ServiceError(f"the application did not become ready:\n{self._log.read_text()[-3_000:]}")

    def stop(self) -> None:
        """Ends the application in order, and by force what is left of it."""
        self._table = None
        started = [psutil.Process(pid) for pid in self.processes.roles if psutil.pid_exists(pid)]
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        left = [process for process in started if process.is_running()]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)
        self._process.wait(10)


@contextlib.contextmanager
def serving(config: Mapping[str, Any], front: Front = "shipped", ready_path: str = "/health/ready") -> Iterator[Served]:
    """An application that is ready, through the installed command; ended at the end of the `with`."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    config = copy.deepcopy(dict(config))
    config["http_options"]["port"] = port = _free_port()
    path, log = folder / "serve_config.yaml", folder / "log"
    path.write_text(yaml.safe_dump(config))
    command = shutil.which("tokenalign-deploy", path=str(Path(sys.executable).parent))
    if command is None:
        raise ServiceError("tokenalign-deploy is not installed beside this Python; run `make bench`")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, "serve", str(path)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
            env=_environment(front, folder),
        )
    served = Served(port, process, log)
    try:
        served.wait_until_ready(ready_path)
        yield served
    finally:
        if process.poll() is None:
            served.stop()
        shutil.rmtree(folder, ignore_errors=True)


def shipped_config(**args: Mapping[str, Any]) -> dict[str, Any]:
    """serve_config.yaml as it ships, with sections of `args` overridden by key."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    given = config["applications"][0].setdefault("args", {})
    for section, values in args.items():
        given[section] = {**given.get(section, {}), **values}
    return config


def _environment(front: Front, folder: Path) -> dict[str, str]:
    """With HAProxy's files and ports apart from those of any other on this machine."""
    own = {
        "PYTHONPATH": str(ROOT),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
    }
    if front != "shipped":
        own["RAY_SERVE_ENABLE_HA_PROXY"] = "1" if front == "haproxy" else "0"
    return {**os.environ, **own}


def _haproxies(port: int) -> list[psutil.Process]:
    """HAProxy of the application on that port: it is a child of none of the application's processes."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "haproxy" and any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in process.net_connections("tcp")
            ):
                found.append(process)
    return found


def _get(host: str, port: int, path: str) -> str:
    """The body of a GET with status 200; empty for anything else."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    where = host if host not in ("0.0.0.0", "::") else "127.0.0.1"  # noqa: S104  compared, not bound
    try:
        with opener.open(f"http://{where}:{port}{path}", timeout=3) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, ValueError, urllib.error.URLError, EOFError):
        return ""
    except Exception:  # noqa: BLE001  a port that speaks no HTTP may answer anything
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _expect(answer: dict[str, Any], event: str) -> None:
    if answer.get("event") != event:
        raise ServiceError(f"the load generator said {answer} where {event!r} was due")
