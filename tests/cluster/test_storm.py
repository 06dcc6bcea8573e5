"""Callers that leave, dawdle or never say anything do the others no harm, and leave nothing behind."""

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.cluster.conftest import Report
from tests.cluster.load import LABELS, OK, TEXTS, Known, Load
from tests.cluster.nodes import Cluster, Config, wait_for

LEAVING = 400
DAWDLING = 40
SILENT = 60
GAUGES = (
    "tokenalign_http_requests_in_progress",
    "tokenalign_queued_texts",
    "tokenalign_queued_tokens",
    "tokenalign_batches_in_flight",
    "tokenalign_encoder_tokens_in_hand",
    "serve_replica_processing_queries",
)
FRONTS = {"HAProxy": True, "Serve's own proxy": False}
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing tells the other side by a reset, not by an end


@pytest.fixture(scope="module", params=FRONTS)
def cluster(
    request: pytest.FixtureRequest,
    start_cluster: Callable[..., AbstractContextManager[Cluster]],
    config_of: Callable[..., Config],
) -> Iterator[Cluster]:
    """One worker with one replica of each deployment."""
    with start_cluster(
        lambda cluster: config_of(cluster, replicas=1), workers=1, haproxy=FRONTS[request.param]
    ) as running:
        running.name = request.param
        yield running


def request_bytes(cluster: Cluster) -> bytes:
    """A good request, of many texts so that it takes a while."""
    body = json.dumps({"texts": random.sample(TEXTS, 24), "labels": LABELS}).encode()
    head = f"POST /v1/classify HTTP/1.1\r\nhost: 127.0.0.1:{cluster.http_port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def connected(cluster: Cluster):  # type: ignore[no-untyped-def]  # (reader, writer) for a while
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def leave(cluster: Cluster) -> None:
    """Asks, and is gone before the answer, now and then with a reset or in the middle of the body."""
    request = request_bytes(cluster)
    async with connected(cluster) as (_, writer):
        if random.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.write(request[: random.choice([len(request), len(request), len(request) // 2])])
        with contextlib.suppress(OSError):
            await writer.drain()
        await asyncio.sleep(random.random() / 10)


async def dawdle(cluster: Cluster) -> bytes:
    """Sends a good request in small pieces over seconds; how the answer begins."""
    request = request_bytes(cluster)
    piece = len(request) // 30
    async with connected(cluster) as (reader, writer):
        for start in range(0, len(request), piece):
            writer.write(request[start : start + piece])
            await writer.drain()
            await asyncio.sleep(0.1)
        answer: bytes = await asyncio.wait_for(reader.read(1_000), 60)
        return answer


async def say_nothing(cluster: Cluster, until: asyncio.Event) -> None:
    """Holds a connection open, with half of a request's head on it or nothing at all."""
    async with connected(cluster) as (_, writer):
        writer.write(random.choice([b"", request_bytes(cluster)[:40]]))
        await until.wait()


async def test_storm(cluster: Cluster, known: Known, report: Report) -> None:
    """After and beside all of these every good request is answered, and every gauge is back at zero."""
    random.seed(6)
    load, end = Load(cluster.url, known), asyncio.Event()
    silent = [asyncio.create_task(say_nothing(cluster, end)) for _ in range(SILENT)]
    begun_s = time.monotonic()
    dawdling = [asyncio.create_task(dawdle(cluster)) for _ in range(DAWDLING)]
    for _ in range(LEAVING // 20):
        await asyncio.gather(*(leave(cluster) for _ in range(20)), return_exceptions=True)
    answers = await asyncio.gather(*dawdling)
    async with load.at(30):
        await load.good(300)
    report.add(f"a storm of callers that leave, dawdle or say nothing ({cluster.name})", load, begun_s)
    assert set(load.kinds()) == {OK}
    failed = [answer for answer in answers if answer.split()[1:2] != [b"200"]]
    assert not failed, failed[0]
    end.set()
    await asyncio.gather(*silent, return_exceptions=True)
    for name in GAUGES:
        await asyncio.to_thread(wait_for, name, lambda n=name: cluster.gauges(n), 60)

        def all_zero(name: str = name) -> bool:
            return set(cluster.gauges(name)) == {0.0}

        await asyncio.to_thread(wait_for, f"{name} back at zero", all_zero, 60)
