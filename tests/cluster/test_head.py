"""The head's GCS is killed, and the whole head with it: what it knew is in its Redis, and the workers serve on."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.cluster.conftest import DEPLOYMENTS, REPLICAS, Report
from tests.cluster.load import OK, Known, Load
from tests.cluster.nodes import Cluster, Config, wait_for


async def test_gcs(
    start_cluster: Callable[..., AbstractContextManager[Cluster]],
    config_of: Callable[..., Config],
    known: Known,
    report: Report,
) -> None:
    """Requests that reach an ingress, as by the proxy of another node, are answered while there is no head at all.

    The proxy on the head ends with it. Once the head is there again, the same replicas are behind it.
    """
    with start_cluster(config_of, fault_tolerant=True) as cluster:
        before = {process.pid for name in DEPLOYMENTS for process in cluster.replicas(name)}
        direct = Load(cluster.ingress_url(), known)
        async with direct.at(20):
            await direct.good(40)
            fault_s = time.monotonic()
            await asyncio.to_thread(cluster.kill_gcs)
            await direct.good(200)  # without a head
            report.add("the head, past its proxy", direct, fault_s)
            await asyncio.to_thread(cluster.restart_head)
            await asyncio.to_thread(cluster.wait_until_ready)
            ready_after_s = time.monotonic() - fault_s
            await direct.good(40)
        assert set(direct.kinds()) == {OK}
        through = Load(cluster.url, known)
        async with through.at(20):
            await through.good(100)
        report.note(f"the head: its own proxy is ready again {ready_after_s:.0f} s after it was killed")
        wait_for("all replicas", lambda: all(len(cluster.replicas(name)) == REPLICAS for name in DEPLOYMENTS))
        assert before == {process.pid for name in DEPLOYMENTS for process in cluster.replicas(name)}
