"""A replica that runs but gets nowhere is found and replaced, while the others answer."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Report
from tests.cluster.load import OK, Known, Load
from tests.cluster.nodes import Cluster, Config, wait_for
from tests.cluster.wedging import TRAP

MAX_PASS_S = 5.0
# Where the replica is found too late for its callers, whose time limit is 30 s, or its batch is lost twice.
TOLD = {"503 not_ready", "504 deadline_exceeded"}


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file: where it is, one forward pass takes it away and never ends."""
    return tmp_path_factory.mktemp("trap") / "armed"


@pytest.fixture(scope="module")
def cluster(
    start_cluster: Callable[..., AbstractContextManager[Cluster]], config_of: Callable[..., Config], trap: Path
) -> Iterator[Cluster]:
    """Two encoders, whose passes count as wedged after 5 s."""

    def config_for(cluster: Cluster) -> Config:
        config = config_of(cluster, health={"max_pass_s": MAX_PASS_S})
        [app] = config["applications"]
        app["import_path"] = "tests.cluster.wedging:build_app"
        app["runtime_env"]["env_vars"][TRAP] = str(trap)
        return config

    with start_cluster(config_for) as running:
        yield running


async def outlast(cluster: Cluster, known: Known, wedge: Callable[[], psutil.Process | None]) -> tuple[Load, float]:
    """The load during which `wedge` wedged an encoder, once another is in its place; and when that was done."""
    before = cluster.replicas("Encoder")
    load = Load(cluster.url, known)
    async with load.at(20):
        await load.good(40)
        fault_s = time.monotonic()
        wedge()

        def replaced() -> bool:
            now = cluster.replicas("Encoder")
            return len(now) == len(before) and set(now) != set(before)

        await asyncio.to_thread(wait_for, "another encoder", replaced)
        await load.good(100)
    return load, fault_s


async def test_a_pass_that_never_ends(cluster: Cluster, known: Known, report: Report, trap: Path) -> None:
    """Its replica is replaced after `health.max_pass_s` and three failed checks; its batch is computed by another."""
    load, fault_s = await outlast(cluster, known, trap.touch)
    report.add(f"a pass that never ends (health.max_pass_s={MAX_PASS_S:g})", load, fault_s)
    assert set(load.kinds()) <= {OK, *TOLD}


async def test_a_stopped_process(cluster: Cluster, known: Known, report: Report) -> None:
    """One that answers nothing at all, as on a machine that swaps, fails the checks by their time limit."""
    victim = cluster.replicas("Encoder")[0]
    load, fault_s = await outlast(cluster, known, victim.suspend)
    report.add("a stopped encoder (SIGSTOP)", load, fault_s)
    assert set(load.kinds()) <= {OK, *TOLD}
