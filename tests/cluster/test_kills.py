"""A process of a running application is killed under load: requests are tried again, nothing hangs or is mixed up."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import psutil
import pytest

from tests.cluster.conftest import DEPLOYMENTS, REPLICAS, Report
from tests.cluster.load import OK, Known, Load
from tests.cluster.nodes import Cluster, Config, wait_for

LOST = "503 not_ready"  # tried once more by us, in vain
LATE = "504 deadline_exceeded"  # sent to a node that Ray did not know to be lost yet, and then again
# What those see whose connection, or the way behind it, ended. It is the proxy's doing, or that of its end.
CUT = {"RemoteProtocolError", "ReadError", "WriteError", "ConnectError", "ConnectTimeout", "ReadTimeout"}
OF_THE_PROXY = {"404 of the proxy", "500 of the proxy", "502 of the proxy", "503 of the proxy", "504 of the proxy"}
RATE_HZ = 30.0
FRONTS = {"HAProxy and messages": True, "Serve's own proxy and calls": False}


@pytest.fixture(scope="module", params=FRONTS)
def cluster(
    request: pytest.FixtureRequest,
    start_cluster: Callable[..., AbstractContextManager[Cluster]],
    config_of: Callable[..., Config],
) -> Iterator[Cluster]:
    """Two workers with a replica of each deployment on either."""

    def config_for(cluster: Cluster) -> Config:
        config = config_of(cluster)
        for deployment in config["applications"][0]["deployments"]:
            deployment["max_replicas_per_node"] = 1
        return config

    with start_cluster(config_for, haproxy=FRONTS[request.param]) as running:
        running.name = request.param
        yield running


def all_replicas(cluster: Cluster, gone: list[psutil.Process]) -> bool:
    """Whether there are as many as there should be, of which none is about to be found dead."""
    found = [cluster.replicas(name) for name in DEPLOYMENTS]
    return all(len(replicas) == REPLICAS for replicas in found) and not any(p in gone for of in found for p in of)


async def survive(
    cluster: Cluster, known: Known, report: Report, name: str, kill: Callable[[], list[psutil.Process]]
) -> Load:
    """The load during which `kill` killed something, once good answers come again and all replicas are there."""
    load = Load(cluster.url, known)
    async with load.at(RATE_HZ):
        await load.good(60)
        await load.busy(2)
        fault_s = time.monotonic()
        gone = await asyncio.to_thread(kill)
        await asyncio.sleep(3)  # of the load, so that the fault is met
        await load.good(100)
        await asyncio.to_thread(wait_for, "all replicas", lambda: all_replicas(cluster, gone))
        full_after_s = time.monotonic() - fault_s
        await load.good(60)
    report.add(f"{name} ({cluster.name})", load, fault_s, full_after_s)
    assert load.started == len(load.endings)
    return load


def killed(processes: list[psutil.Process]) -> list[psutil.Process]:
    assert processes
    for process in processes:
        process.kill()
    return processes


@pytest.mark.parametrize("deployment", ["Encoder", "Scorer"])
async def test_encoder_or_scorer(cluster: Cluster, known: Known, report: Report, deployment: str) -> None:
    """Batches that were with it go to another replica; at worst a caller gets a 503 that says to try again."""
    victims = cluster.replicas(deployment)[:1]
    load = await survive(cluster, known, report, deployment, lambda: killed(victims))
    assert set(load.kinds()) <= {OK, LOST}


async def test_ingress(cluster: Cluster, known: Known, report: Report) -> None:
    """Its own callers lose their answers, as soon as it ends; everybody else has theirs."""
    victims = cluster.replicas("Ingress")[:1]
    load = await survive(cluster, known, report, "Ingress", lambda: killed(victims))
    assert set(load.kinds()) <= {OK, LOST, *CUT, *OF_THE_PROXY}


async def test_controller(cluster: Cluster, known: Known, report: Report) -> None:
    """Nobody notices: requests need no controller."""
    victims = cluster.controllers()
    load = await survive(cluster, known, report, "Serve's controller", lambda: killed(victims))
    assert set(load.kinds()) == {OK}
    wait_for("another controller", lambda: set(cluster.controllers()) - set(victims))


async def test_proxy(cluster: Cluster, known: Known, report: Report) -> None:
    """The only one there is: its callers are cut off, and new ones can't connect until Serve has started another."""
    load = await survive(cluster, known, report, "the only proxy", lambda: killed(cluster.proxies()))
    assert set(load.kinds()) <= {OK, LOST, *CUT, *OF_THE_PROXY}


async def test_worker_node(cluster: Cluster, known: Known, report: Report) -> None:
    """A whole node ends with a replica of each deployment: those on the other one serve on alone."""

    def kill() -> list[psutil.Process]:
        gone = [process for name in DEPLOYMENTS for process in cluster.replicas(name)]
        cluster.lose_worker()
        gone = [process for process in gone if not process.is_running()]
        assert len(gone) == len(DEPLOYMENTS)
        cluster.add_worker()
        return gone

    load = await survive(cluster, known, report, "a worker node", kill)
    assert set(load.kinds()) <= {OK, LOST, LATE, *CUT, *OF_THE_PROXY}
