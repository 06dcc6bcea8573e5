"""Replicas that share a real server: label caches with encoders of their own, checked against a cold computation."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import redis

from deploy.label_cache import CachedLabels, EmbeddedServer, LabelCache, LabelRows, RedisStore, Store
from deploy.label_cache.codec import decode_rows, encode_rows
from deploy.label_cache.redis_clients import ConnectionOptions

WIDTH = 8
MIB = 2**20


def rows_of(description: str, fingerprint: str) -> LabelRows:
    """`[1 to 5, WIDTH]` rows that depend on description and model alone."""
    seed = int.from_bytes(hashlib.sha256(f"{fingerprint}\n{description}".encode()).digest()[:8], "big")
    values = np.random.default_rng(seed).standard_normal((1 + seed % 5, WIDTH)).astype(np.float32)
    return LabelRows(values, np.array([len(values)], dtype=np.int32))


def assert_cold(got: LabelRows, descriptions: Sequence[str], fingerprint: str) -> None:
    """The rows are, bit for bit, those of a computation without any cache."""
    packed = [encode_rows("", rows_of(description, fingerprint), None) for description in descriptions]
    cold = LabelRows.join([decode_rows("", data, None, width=WIDTH, descriptions=1) for data in packed])
    assert got.values.dtype == cold.values.dtype
    assert got.values.tobytes() == cold.values.tobytes()
    assert got.lengths.tolist() == cold.lengths.tolist()


class Replica:
    """A label cache on `store` whose encoder records what it is asked, and can be held up or made to fail."""

    def __init__(self, store: Store | None, fingerprint: str = "f1", **options: Any) -> None:
        self.fingerprint = fingerprint
        self.encoded: list[str] = []
        self.calls = 0
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        # A loaded machine must not turn a slow answer into a fault: tests that are about time say so.
        patient = {"store_budget_s": 60, "write_budget_s": 60, "lock_wait_s": 60, "lock_ttl_s": 60}
        self.cache = LabelCache(store, self._encode, width=WIDTH, fingerprint=fingerprint, **{**patient, **options})
        self.stats = self.cache.stats

    async def ask(self, descriptions: Sequence[str], tenant: str | None = None) -> CachedLabels:
        """The answer, once it was found to be that of a cold computation."""
        got = await self.cache.get(descriptions, tenant)
        assert_cold(got.rows, descriptions, self.fingerprint)
        return got

    async def _encode(self, descriptions: list[str]) -> LabelRows:
        self.calls += 1
        self.encoded += descriptions
        self.asked.set()
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return LabelRows.join([rows_of(description, self.fingerprint) for description in descriptions])


@pytest.fixture(scope="module")
def shared_server() -> Iterator[EmbeddedServer]:
    """A Valkey server for all tests of a module."""
    with EmbeddedServer(max_memory_bytes=128 * MIB) as server:
        yield server


@pytest.fixture
def server(shared_server: EmbeddedServer) -> EmbeddedServer:
    """A running Valkey server that holds nothing."""
    shared_server.restart()
    with redis.Redis.from_url(shared_server.url, protocol=2) as admin:
        admin.flushall()
        admin.config_resetstat()
    return shared_server


@pytest.fixture
def admin(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A plain client of the server."""
    with redis.Redis.from_url(server.url, protocol=2) as client:
        yield client


@pytest.fixture
async def new_replica(server: EmbeddedServer) -> AsyncIterator[Callable[..., Replica]]:
    """Makes replicas on the server, or on another store; they are closed afterwards."""
    made: list[Replica] = []

    def make(*, on: Store | str | None = "server", **options: Any) -> Replica:
        store = RedisStore.from_url(server.url, ConnectionOptions(read_timeout_s=60)) if isinstance(on, str) else on
        made.append(Replica(store, **options))
        return made[-1]

    yield make
    for replica in made:
        replica.gate.set()
        await replica.cache.close()
