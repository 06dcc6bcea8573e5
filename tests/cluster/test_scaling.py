"""The number of replicas changes under load, and so do settings: no request fails for it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.cluster.conftest import DEPLOYMENTS, Report
from tests.cluster.load import OK, Known, Load
from tests.cluster.nodes import Cluster, Config, wait_for

QUICK = {"min_replicas": 1, "max_replicas": 2, "metrics_interval_s": 1, "look_back_period_s": 3, "downscale_delay_s": 5}
SCALING = {
    "Ingress": {**QUICK, "target_ongoing_requests": 20, "upscale_delay_s": 1},
    "Encoder": {
        **QUICK,
        "policy": {"policy_function": "deploy.autoscaling:TokensWaiting", "policy_kwargs": {"tokens_per_replica": 400}},
    },
    "Scorer": {
        **QUICK,
        "policy": {"policy_function": "deploy.autoscaling:ScorersBusy", "policy_kwargs": {"busy_share": 0.05}},
    },
}
MUCH_HZ = 400.0  # more than two cores serve, so that requests queue
LITTLE_HZ = 4.0


@pytest.fixture(scope="module")
def config(config_of: Callable[..., Config]) -> Callable[[Cluster], Config]:
    """One replica of each; queues that never refuse, so that a failed request is one that a change has cost."""
    patient = {"max_queue_wait_s": 60.0, "request_timeout_s": 60.0}
    return lambda cluster: config_of(cluster, replicas=1, batching=patient)


@pytest.fixture(scope="module")
def cluster(
    start_cluster: Callable[..., AbstractContextManager[Cluster]], config: Callable[[Cluster], Config]
) -> Iterator[Cluster]:
    """Two workers, on which there is one replica of each at first."""
    with start_cluster(config) as running:
        yield running


def counts(cluster: Cluster) -> dict[str, int]:
    return {name: len(cluster.replicas(name)) for name in DEPLOYMENTS}


async def reached(cluster: Cluster, wanted: dict[str, int]) -> None:
    """Returns once each deployment has had that many replicas; fails naming those that never had."""
    left = dict(wanted)

    def found() -> bool:
        now = counts(cluster)
        for name in [name for name, count in left.items() if now[name] == count]:
            del left[name]
        return not left

    try:
        await asyncio.to_thread(wait_for, f"{wanted} replicas", found)
    except AssertionError as error:
        raise AssertionError(f"{error}; {left} were never there, now {counts(cluster)}") from error


async def test_up_under_load_and_down_after_it(
    cluster: Cluster, known: Known, report: Report, config: Callable[[Cluster], Config]
) -> None:
    """All three kinds follow what waits in our own queues, and no request is lost on the way up or down."""
    changed = config(cluster)
    for deployment in changed["applications"][0]["deployments"]:
        del deployment["num_replicas"]
        deployment["autoscaling_config"] = SCALING[deployment["name"]]
    cluster.deploy(changed)
    load = Load(cluster.url, known)
    begun_s = time.monotonic()
    async with load.at(MUCH_HZ):
        await reached(cluster, dict.fromkeys(DEPLOYMENTS, 2))
        up_after_s = time.monotonic() - begun_s
    async with load.at(LITTLE_HZ):
        idle_s = time.monotonic()
        await reached(cluster, dict.fromkeys(DEPLOYMENTS, 1))
        down_after_s = time.monotonic() - idle_s
    report.add("autoscaling, up and down", load, begun_s)
    report.note(f"autoscaling: two replicas of each after {up_after_s:.0f} s, one again after {down_after_s:.0f} s")
    assert set(load.kinds()) == {OK}


async def test_replicas_taken_away(
    cluster: Cluster, known: Known, report: Report, config: Callable[[Cluster], Config]
) -> None:
    """A deployment made smaller under load finishes what its replicas have in hand."""
    more, fewer = config(cluster), config(cluster)
    for deployment in more["applications"][0]["deployments"]:
        deployment["num_replicas"] = 2
    await asyncio.to_thread(cluster.deploy, more)
    await reached(cluster, dict.fromkeys(DEPLOYMENTS, 2))
    load = Load(cluster.url, known)
    async with load.at(30):
        await load.good(60)
        begun_s = time.monotonic()
        await asyncio.to_thread(cluster.deploy, fewer)
        await reached(cluster, dict.fromkeys(DEPLOYMENTS, 1))
        await load.good(60)
    report.add("replicas taken away", load, begun_s)
    assert set(load.kinds()) == {OK}


async def test_slots(cluster: Cluster, config: Callable[[Cluster], Config]) -> None:
    """The one ingress has as many batches in flight as two encoders take, once there are two."""
    more = config(cluster)
    for deployment in more["applications"][0]["deployments"]:
        deployment["num_replicas"] = 2 if deployment["name"] == "Encoder" else 1
    cluster.deploy(more)
    await reached(cluster, {"Encoder": 2})
    wait_for("slots for two encoders", lambda: 4.0 in cluster.gauges("tokenalign_batch_slots"))


async def test_a_changed_setting(
    cluster: Cluster, known: Known, report: Report, config: Callable[[Cluster], Config]
) -> None:
    """A new configuration replaces every replica while requests go on."""
    before = {process.pid for name in DEPLOYMENTS for process in cluster.replicas(name)}
    changed = config(cluster)
    changed["applications"][0]["args"]["batching"]["max_batch_texts"] = 48

    def replaced() -> bool:
        now = [process.pid for name in DEPLOYMENTS for process in cluster.replicas(name)]
        return len(now) == len(DEPLOYMENTS) and not before & set(now)

    load = Load(cluster.url, known)
    async with load.at(30):
        await load.good(60)
        begun_s = time.monotonic()
        await asyncio.to_thread(cluster.deploy, changed)
        await asyncio.to_thread(wait_for, "other replicas", replaced)
        full_after_s = time.monotonic() - begun_s
        await load.good(60)
    report.add("a changed setting", load, begun_s, full_after_s)
    assert set(load.kinds()) == {OK}
