"""A Ray cluster of several nodes on this machine, each of which starts and ends as a container would."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import yaml

from deploy.front import switches

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PATIENCE_S = 300.0  # of the machine, whose cores are few and shared; never a promise
OBJECT_STORE_BYTES = 100 * 1024 * 1024
REPLICA_PORTS = 33_000  # where Serve begins to look for ports for ingresses, away from a default application's

PR_SET_PDEATHSIG = 1  # of Linux' prctl

AnyT = TypeVar("AnyT")
Config = dict[str, Any]


_given: set[int] = set()


def free_port() -> int:
    """A TCP port that nothing listens on, another one each time."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def wait_for(what: str, found: Callable[[], AnyT], patience_s: float = PATIENCE_S) -> AnyT:
    """What `found` gives as soon as it gives something true; fails naming what was waited for."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.1)  # a condition of other processes, asked for again
    raise AssertionError(f"{what}: not within {patience_s:g} s")


def end_with_the_tests() -> None:
    """Called in a child before it runs: it gets a SIGTERM when the tests' process ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_node(node: "subprocess.Popen[bytes]") -> None:
    """SIGKILL for a process and all that it started."""
    started = _started_by(node)
    node.kill()
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait()
    psutil.wait_procs(started, timeout=30)


def _started_by(node: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(node.pid).children(recursive=True)
    return []


class Redis:
    """A redis-server of our own on a free port of the loopback."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process = self._start()

    @property
    def url(self) -> str:
        """Its first database."""
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        """Ends it at once."""
        kill_node(self._process)

    def _start(self) -> "subprocess.Popen[bytes]":
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", ""]
        process = subprocess.Popen(
            ["redis-server", *options],  # noqa: S607  Debian's
            stdout=subprocess.DEVNULL,
            preexec_fn=end_with_the_tests,
        )

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
            return False

        wait_for("redis-server", answers, 30)
        return process


class Cluster:
    """A head without CPUs and workers with pretended ones; Serve's controller and its one proxy are on the head.

    fault_tolerant: the head keeps what it knows in a Redis, and finds its cluster again
    haproxy: HAProxy in front, and messages between replicas, as `tokenalign-deploy serve` sets them; else what Serve
      does by itself, as on Kubernetes
    """

    def __init__(self, folder: Path, *, workers: int = 2, fault_tolerant: bool = False, haproxy: bool = True) -> None:
        self.name = ""
        self.folder = folder
        # Unix sockets have a name of at most 107 bytes, so Ray's folder has a short one.
        self._ray = Path(tempfile.mkdtemp(prefix="tac-", dir="/tmp"))
        self.cache = Redis(folder)
        self._memory = Redis(folder) if fault_tolerant else None
        self._gcs_port = free_port()
        self.http_port = free_port()
        self._environment = self._environment_of(haproxy)
        self._metrics_ports: list[int] = []
        self._head = self._start_head()
        self.workers = [self._start_worker() for _ in range(workers)]

    @property
    def address(self) -> str:
        """For `ray.init` and Serve's commands."""
        return f"127.0.0.1:{self._gcs_port}"

    @property
    def url(self) -> str:
        """Of the application."""
        return f"http://127.0.0.1:{self.http_port}"

    def close(self) -> None:
        """Ends all that was started, at once."""
        for node in [*self.workers, self._head]:
            kill_node(node)
        self.cache.stop()
        if self._memory is not None:
            self._memory.stop()

    def add_worker(self) -> None:
        """One more node, with as many pretended CPUs."""
        self.workers.append(self._start_worker())

    def lose_worker(self) -> None:
        """SIGKILL for a node's raylet: its other processes see that and end, what is left of it is cleared away."""
        worker = self.workers.pop(0)
        self._kill_and_clear(worker, "raylet")

    def kill_gcs(self) -> None:
        """SIGKILL for the head's GCS: `ray start --block` sees it and ends all that is on the head, as a pod would."""
        self._kill_and_clear(self._head, "gcs_server")

    def restart_head(self) -> None:
        """What keeps a pod running does: the head starts again on the same address."""
        # A new pod has nothing of the old one; `ray start` would take what it finds here for a head that still runs.
        (self._ray / "ray_current_cluster").unlink(missing_ok=True)
        self._head = self._start_head()

    def _kill_and_clear(self, node: "subprocess.Popen[bytes]", name: str) -> None:
        started = _started_by(node)
        [victim] = [process for process in started if process.name() == name]
        victim.kill()
        wait_for("the node's own end", lambda: node.poll() is not None)
        for process in psutil.wait_procs(started, timeout=30)[1]:
            process.kill()

    def deploy(self, config: Config) -> None:
        """Hands Serve a configuration, as `serve deploy` does; returns once it is taken, not once it is there."""
        path = self.folder / "serve_config.yaml"
        path.write_text(yaml.safe_dump(config))
        words = [sys.executable, "-m", "ray.serve.scripts", "run", str(path), "--non-blocking", "-a", self.address]
        done = subprocess.run(
            words, env=self._environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr[-4_000:]

    def wait_until_ready(self) -> None:
        """Returns once the application answers that it is ready."""

        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/health/ready", timeout=5, trust_env=False).status_code == 200
            return False

        wait_for("the application", ready)

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas, the oldest first."""
        title = f"ray::ServeReplica:tokenalign:{deployment}"
        return sorted((p for p in self._of_ours() if _title(p).startswith(title)), key=lambda p: p.create_time())

    def ingress_url(self) -> str:
        """Where an ingress takes requests itself, as HAProxy sends them to it."""
        for process in self.replicas("Ingress"):
            for connection in process.net_connections(kind="tcp"):
                port = connection.laddr.port
                if connection.status == psutil.CONN_LISTEN and REPLICA_PORTS <= port < REPLICA_PORTS + 1_000:
                    return f"http://127.0.0.1:{port}"
        raise AssertionError("no ingress listens by itself")

    def controllers(self) -> list[psutil.Process]:
        """The process of Serve's controller, or none while there is none."""
        return [process for process in self._of_ours() if _title(process).startswith("ray::ServeController")]

    def proxies(self) -> list[psutil.Process]:
        """HAProxy's processes, else those of Serve's own proxies."""
        ours = self._of_ours()
        return [p for p in ours if p.name() == "haproxy"] or [
            p for p in ours if _title(p).startswith("ray::ProxyActor")
        ]

    def gauges(self, name: str) -> list[float]:
        """What all replicas say of a gauge, as Prometheus reads it of Ray; `name` without Ray's prefix."""
        found = []
        for port in self._metrics_ports:
            with contextlib.suppress(httpx.TransportError):
                lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text.splitlines()
                found += [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"ray_{name}{{")]
        return found

    def logs(self) -> str:
        """What replicas wrote at level WARNING and above."""
        folder = self._ray / "session_latest" / "logs" / "serve"
        return "\n".join(path.read_text(errors="replace")[-4_000:] for path in sorted(folder.glob("replica_*.log")))

    def _of_ours(self) -> list[psutil.Process]:
        """Every process below the nodes', those of nodes that are gone left out."""
        return [process for node in [self._head, *self.workers] for process in _started_by(node)]

    def _environment_of(self, haproxy: bool) -> Mapping[str, str]:
        own = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # where tests.cluster.wedging is found
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(REPLICA_PORTS),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(REPLICA_PORTS + 1_000),
        }
        if self._memory is not None:
            own["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{self._memory.port}"
        if haproxy:
            files = self._ray / "haproxy"
            files.mkdir()
            own |= switches(own, files, lambda _: free_port())
        return own

    def _start_head(self) -> "subprocess.Popen[bytes]":
        ports = ["--port", str(self._gcs_port), "--ray-client-server-port", str(free_port())]
        return self._start_node(
            ["--head", "--num-cpus=0", "--include-dashboard=false", "--temp-dir", str(self._ray), *ports]
        )

    def _start_worker(self) -> "subprocess.Popen[bytes]":
        return self._start_node(["--address", self.address, "--num-cpus", "8"])

    def _start_node(self, options: list[str]) -> "subprocess.Popen[bytes]":
        """A node, once it runs: two that start at the same moment on one machine are in each other's way."""
        same = ["--block", "--node-ip-address", "127.0.0.1", "--object-store-memory", str(OBJECT_STORE_BYTES)]
        self._metrics_ports.append(free_port())
        ports = ["--min-worker-port", "0", "--max-worker-port", "0", f"--metrics-export-port={self._metrics_ports[-1]}"]
        ports += [f"--{name}={free_port()}" for name in ("dashboard-agent-listen-port", "dashboard-agent-grpc-port")]
        path = self.folder / f"node-{time.monotonic_ns()}.log"
        with path.open("wb") as log:
            node = subprocess.Popen(
                [str(BIN / "ray"), "start", *same, *ports, *options],
                env=self._environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_the_tests,
            )

        def runs() -> bool:
            assert node.poll() is None, path.read_text()
            return "Ray runtime started" in path.read_text()

        wait_for("a node", runs, 120)
        return node


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def running(folder: Path, **options: Any) -> Iterator[Cluster]:
    """A cluster that ends with the `with`, whatever happened."""
    cluster = Cluster(folder, **options)
    try:
        yield cluster
    finally:
        cluster.close()
