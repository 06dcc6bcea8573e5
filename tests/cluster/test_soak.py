"""The application runs for long under a steady load, and holds no more memory in the end than after its warm-up."""

import asyncio
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import psutil
import pytest

from tests.cluster.conftest import DEPLOYMENTS, Report
from tests.cluster.load import OK, Known, Load
from tests.cluster.nodes import Cluster, Config

DURATION_S = float(os.environ.get("TOKENALIGN_SOAK_S", "1200"))
PERIOD_S = DURATION_S / 120
MIB = 1024 * 1024
GROWTH = 0.03  # of a replica's memory, from the second quarter of the time to the last
RATE_HZ = 10.0


def memory(cluster: Cluster) -> dict[str, int]:
    """Bytes that each replica alone holds."""
    found: dict[str, int] = {}
    for name in DEPLOYMENTS:
        [replica] = cluster.replicas(name)
        found[name] = private_bytes(replica)
    return found


def private_bytes(process: psutil.Process) -> int:
    """What would be given back if it ended: pages of libraries and of Ray's shared store are left out."""
    return int(process.memory_full_info().uss)


@pytest.mark.timeout(DURATION_S + 900)
async def test_memory_stays_flat(
    start_cluster: Callable[..., AbstractContextManager[Cluster]],
    config_of: Callable[..., Config],
    known: Known,
    report: Report,
) -> None:
    """From the second quarter of the time to the last, no replica grows by more than 3 %; and no request fails.

    TOKENALIGN_SOAK_S sets the time, 20 minutes unless it is there.
    """
    with start_cluster(lambda cluster: config_of(cluster, replicas=1), workers=1) as cluster:
        load, samples = Load(cluster.url, known), []
        begun_s = time.monotonic()
        async with load.at(RATE_HZ):
            while time.monotonic() - begun_s < DURATION_S:
                await asyncio.sleep(PERIOD_S)
                samples.append(await asyncio.to_thread(memory, cluster))
        report.add(f"soak of {DURATION_S / 60:.0f} minutes at {RATE_HZ:g} requests/s", load, begun_s)
    quarter = len(samples) // 4
    for name in DEPLOYMENTS:
        early = statistics.median(sample[name] for sample in samples[quarter : 2 * quarter])
        late = statistics.median(sample[name] for sample in samples[-quarter:])
        report.note(f"soak, {name}: {early / MIB:.0f} MiB in the second quarter, {late / MIB:.0f} MiB in the last")
        assert late <= early * (1 + GROWTH), f"{name} grew from {early / MIB:.0f} to {late / MIB:.0f} MiB"
    assert set(load.kinds()) == {OK}
