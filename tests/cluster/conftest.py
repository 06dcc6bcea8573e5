"""Fixtures for the application on several Ray nodes, and the table of what faults did to it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.load import OK, Known, Load
from tests.cluster.nodes import ROOT, Cluster, Config, running, wait_for

DEPLOYMENTS = ("Ingress", "Encoder", "Scorer")
REPLICAS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here takes minutes."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.timeout(900))


@dataclass
class Report:
    """What faults did, as lines of a table."""

    lines: list[str] = field(default_factory=list)

    def add(self, fault: str, load: Load, fault_s: float, full_after_s: float | None = None) -> None:
        """A line about a load during which something happened at `fault_s` of the monotonic clock."""
        failed = {kind: n for kind, n in load.kinds(fault_s).items() if kind != OK}
        total = sum(load.kinds(fault_s).values())
        full = "" if full_after_s is None else f", all replicas again after {full_after_s:.0f} s"
        self.lines.append(
            f"{fault}: {total} requests, failed {failed or 'none'}, the last {load.recovered_after_s(fault_s):.1f} s "
            f"after it; longest time without an answer {load.silence_s(fault_s):.1f} s{full}"
        )

    def note(self, line: str) -> None:
        """A line as it is."""
        self.lines.append(line)


_REPORT = Report()


@pytest.fixture(scope="session")
def report() -> Report:
    """Collects what is told at the end."""
    return _REPORT


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tells it."""
    if _REPORT.lines:
        terminalreporter.section("what faults did")
        for line in _REPORT.lines:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def known() -> Known:
    """The answers as the library gives them."""
    return Known.by_the_library()


@pytest.fixture(scope="session")
def config_of() -> Callable[..., Config]:
    """Makes the project's configuration into one for a cluster; keywords are changes of sections of the settings."""

    def make(cluster: Cluster, replicas: int = REPLICAS, **sections: dict[str, Any]) -> Config:
        config: Config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        config["http_options"]["port"] = cluster.http_port
        [app] = config["applications"]
        args = app["args"]
        args["label_cache"]["url"] = cluster.cache.url
        args["threads"] = {"encoder": 1, "scorer": 1}
        # Who is told 429 while a busy machine recovers says nothing of the fault.
        args["batching"] = {**args.get("batching", {}), "max_queue_wait_s": 60.0}
        for name, changes in sections.items():
            args[name] = {**args.get(name, {}), **changes}
        app["deployments"] = [
            {"name": name, "num_replicas": replicas, "ray_actor_options": {"num_cpus": 1}} for name in DEPLOYMENTS
        ]
        return config

    return make


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Cluster]]:
    """Starts a cluster with the application on it, all replicas there."""

    @contextmanager
    def start(config_for: Callable[[Cluster], Config], **options: Any) -> Iterator[Cluster]:
        with running(tmp_path_factory.mktemp("cluster"), **options) as cluster:
            config = config_for(cluster)
            cluster.deploy(config)
            cluster.wait_until_ready()
            for deployment in config["applications"][0]["deployments"]:
                wanted = deployment.get("num_replicas", 1)
                wait_for("all replicas", lambda d=deployment, n=wanted: len(cluster.replicas(d["name"])) >= n)
            yield cluster

    return start
