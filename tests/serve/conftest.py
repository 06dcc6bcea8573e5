"""Fixtures that start the real application, as `make serve` does, on a free port of the loopback."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
START_S = 240.0  # of the machine's patience, not a promise: CI's cores are few and shared
STOP_S = 60.0

Config = dict[str, Any]


@dataclass
class Served:
    """A running application: where it listens, and the process that runs it."""

    url: str
    process: "subprocess.Popen[str]"
    log: Path

    def stop(self) -> list[psutil.Process]:
        """Ctrl-C, as a terminal sends it: to the whole process group. Returns what is still running afterwards."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(STOP_S)
        return [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Gives a TCP port that nothing listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


@pytest.fixture(scope="session")
def project_config() -> Callable[[], Config]:
    """Reads the project's own serve_config.yaml."""

    def read() -> Config:
        config: Config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        return config

    return read


@pytest.fixture(scope="session")
def launch(
    tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Callable[[Config], "contextlib.AbstractContextManager[Served]"]:
    """Starts `tokenalign-deploy serve` with a configuration; ends it at the end of the `with`, whatever happened."""

    @contextlib.contextmanager
    def start(config: Config) -> Iterator[Served]:
        folder = tmp_path_factory.mktemp("served")
        config["http_options"]["port"] = free_port()
        path, log = folder / "serve_config.yaml", folder / "log"
        path.write_text(yaml.safe_dump(config))
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "serve", str(path)],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        served = Served(f"http://127.0.0.1:{config['http_options']['port']}", process, log)
        try:
            yield served
        finally:
            if process.poll() is None:
                left = served.stop()
                assert not left, f"still running after Ctrl-C: {left}"

    return start


@pytest.fixture(scope="session")
def wait_until_ready() -> Callable[..., None]:
    """Waits until an application answers that it is ready; fails with the log when it ended instead."""

    def wait(served: Served, prefix: str = "") -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert served.process.poll() is None, f"it ended by itself:\n{served.log.read_text()}"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{served.url}{prefix}/health/ready", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)  # a condition of another process, asked for again
        pytest.fail(f"not ready after {START_S} s:\n{served.log.read_text()}")

    return wait


@pytest.fixture(scope="session")
def default_app(
    launch: Callable[[Config], "contextlib.AbstractContextManager[Served]"],
    project_config: Callable[[], Config],
    wait_until_ready: Callable[..., None],
) -> Iterator[Served]:
    """The application as it ships, one for all tests of it; leaving it checks that Ctrl-C ends all that it started."""
    with launch(project_config()) as running:
        wait_until_ready(running)
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the application as it ships come last, so that it doesn't run beside those that start their own."""
    items.sort(key=lambda item: "default_app" in getattr(item, "fixturenames", ()))
    for item in items:
        starts = {"default_app", "launch"} & set(getattr(item, "fixturenames", ()))
        assert not starts or item.get_closest_marker("serve"), f"{item.nodeid} starts Ray: give it the marker serve"
