"""Whatever the store does, answers are those of a cold computation, and it is used again once it works.

Every answer in this file is compared bit for bit by `Replica.ask`.
"""

import ast
import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import redis

import deploy.label_cache
from deploy.label_cache import EmbeddedServer, LabelRows, RedisStore, Store
from deploy.label_cache.redis_clients import ConnectionOptions
from deploy.label_cache.wrapper import StoreWrapper
from tokenalign.errors import NumericalError

NewReplica = Callable[..., Any]  # see conftest
Until = Callable[[Callable[[], bool]], Any]
ResultT = TypeVar("ResultT")

MIB = 2**20
LIST = [f"label {i}" for i in range(77)]
LIMIT_S = 30  # far above the budgets that are given here, far below the timeouts that would be waited for without


async def settle(*replicas: Any) -> None:
    for replica in replicas:
        await replica.cache.drain()


async def seen_twice(new_replica: NewReplica, descriptions: list[str]) -> None:
    """Leaves list and label entries in the store."""
    for _ in range(2):
        replica = new_replica()
        await replica.ask(descriptions)
        await settle(replica)


def kill(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.alive():
        pass


@contextlib.contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    """Meanwhile the server takes connections and commands, and answers nothing."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


class Between(StoreWrapper):
    """A store before whose calls a test may do something."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.calls = 0
        self.before: Callable[[int], Awaitable[None]] | None = None

    async def _through(self, call: Callable[[Store], Awaitable[ResultT]]) -> ResultT:
        self.calls += 1
        if self.before is not None:
            await self.before(self.calls)
        return await call(self._store)

    async def close(self) -> None:
        await self._store.close()


@pytest.fixture
async def between(server: EmbeddedServer) -> Between:
    return Between(RedisStore.from_url(server.url, ConnectionOptions(read_timeout_s=60)))


class TestServer:
    async def test_absent_at_the_start(self, new_replica: NewReplica, server: EmbeddedServer) -> None:
        """A server that isn't there costs a counted miss; once it is there it is used, without a restart."""
        kill(server)
        replica = new_replica()
        assert (await replica.ask(LIST)).source == "encoder"
        await settle(replica)
        assert replica.stats.lists.misses["connect"] == 1
        assert replica.stats.labels.misses["connect"] == 77
        assert set(replica.stats.store_errors) == {"connect"}
        server.restart()
        other = new_replica()
        await replica.ask(LIST[:50])
        await settle(replica)
        assert (await other.ask(LIST[:50])).hits == 50

    async def test_killed_and_restarted_in_mid_traffic(
        self, new_replica: NewReplica, server: EmbeddedServer, until: Until
    ) -> None:
        """Twice the server is killed under requests on four replicas: none fails, and each time it is used again."""
        replicas = [new_replica(memory_bytes=0, store_retry_s=0, lock_ttl_s=1, lock_wait_s=5) for _ in range(4)]
        answers, going_on = 0, True

        async def client(seed: int) -> None:
            nonlocal answers
            draw = random.Random(seed)
            while going_on:
                start = draw.randrange(60)
                await draw.choice(replicas).ask(LIST[start : start + draw.randrange(1, 20)])
                answers += 1

        def from_store() -> int:
            return sum(replica.stats.lists.hits + replica.stats.labels.hits for replica in replicas)

        def errors() -> int:
            return sum(sum(replica.stats.store_errors.values()) for replica in replicas)

        clients = [asyncio.create_task(client(seed)) for seed in range(12)]
        for _ in range(2):
            used, failed = from_store(), errors()
            await until(lambda used=used: from_store() > used + 100)  # type: ignore[misc]
            kill(server)
            await until(lambda failed=failed: errors() > failed + 20)  # type: ignore[misc]
            before = answers
            await until(lambda before=before: answers > before + 20)  # type: ignore[misc]
            server.restart()
        used = from_store()
        await until(lambda: from_store() > used + 100)
        going_on = False
        await asyncio.gather(*clients)
        await settle(*replicas)
        assert [len(replica.cache._labels) for replica in replicas] == [0] * 4

    async def test_accepting_but_never_answering(self, new_replica: NewReplica, server: EmbeddedServer) -> None:
        """A stalled server is waited for within the budget; when it goes on, late answers reach nobody else."""
        await seen_twice(new_replica, LIST)
        replica = new_replica(memory_bytes=0, store_budget_s=0.2, write_budget_s=0.2)
        with stopped(server):
            async with asyncio.timeout(LIMIT_S):
                for _ in range(3):
                    assert (await replica.ask(LIST)).source == "encoder"
                await settle(replica)
        assert replica.stats.lists.misses["timeout"] == 3
        assert replica.stats.labels.misses["timeout"] == 3 * 77
        patient = new_replica(memory_bytes=0)
        for start in range(30):
            await patient.ask(LIST[start : start + 40])
        assert (await patient.ask(LIST)).source == "list"
        assert patient.encoded == []

    async def test_stalled_while_waiting_for_another_replica(
        self, new_replica: NewReplica, server: EmbeddedServer, until: Until
    ) -> None:
        """A store that stalls while a request waits for another replica's rows ends the wait within the budget."""
        holding, waiting = new_replica(), new_replica(store_budget_s=0.5, write_budget_s=0.2)
        holding.gate.clear()
        first = asyncio.create_task(holding.ask(LIST))
        await holding.asked.wait()
        second = asyncio.create_task(waiting.ask(LIST))
        await until(lambda: waiting.stats.lock_waits == 77 or second.done())
        with stopped(server):
            async with asyncio.timeout(LIMIT_S):
                await second
                await settle(waiting)
        assert len(waiting.encoded) == 77
        assert waiting.stats.store_errors["timeout"] >= 1
        holding.gate.set()
        await first

    @pytest.mark.parametrize("reason", ["oom", "readonly"])
    async def test_refusing_writes(
        self, new_replica: NewReplica, admin: redis.Redis, server: EmbeddedServer, reason: str
    ) -> None:
        """A full server, and a replica of another one, are read as before; what they refused is written later."""
        await seen_twice(new_replica, LIST[:40])
        if reason == "oom":
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", "1mb")
        else:
            admin.replicaof("127.0.0.1", "1")
        replica = new_replica(store_retry_s=0)
        try:
            got = await replica.ask(LIST)
            await settle(replica)
            assert (got.source, got.hits) == ("encoder", 40)
            assert set(replica.stats.store_errors) == {reason}
            assert (await replica.ask(LIST[:40])).source == "list"
            await settle(replica)
        finally:
            admin.replicaof("NO", "ONE")
            admin.config_set("maxmemory", str(128 * MIB))
            admin.config_set("maxmemory-policy", "volatile-lfu")
        await replica.ask(LIST)
        await settle(replica)
        assert (await new_replica().ask(LIST)).hits == 77

    async def test_a_password_that_was_changed(
        self, new_replica: NewReplica, admin: redis.Redis, server: EmbeddedServer
    ) -> None:
        """A server that suddenly wants another password is done without, and used again when it was set right."""
        await seen_twice(new_replica, LIST)
        replica = new_replica(memory_bytes=0)
        await replica.ask(LIST)
        admin.config_set("requirepass", "changed")
        admin.client_kill_filter(_type="normal", skipme=True)
        try:
            await replica.ask(LIST)
            await settle(replica)
            assert replica.stats.store_errors["auth"] >= 1
            assert replica.stats.lists.misses["auth"] == 1
        finally:
            admin.config_set("requirepass", "")
        assert (await replica.ask(LIST)).source == "list"

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (b"-LOADING Redis is loading the dataset in memory", "loading"),
            (b"-MOVED 3999 127.0.0.1:6381", "cluster"),
            (b"-NOAUTH Authentication required.", "auth"),
            (b"-NOPERM this user has no permissions", "permission"),
            (b"-ERR something else", "server"),
            (b"HTTP/1.1 400 Bad Request", None),
        ],
    )
    async def test_answering_with_an_error(
        self, new_replica: NewReplica, tmp_path: Path, answer: bytes, reason: str | None
    ) -> None:
        """Whatever a server answers instead of doing its work, the request is answered and the reason is counted."""

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():  # "*3" and then, for each of 3 arguments, its length and itself
                if line.startswith(b"*"):
                    arguments = [(await reader.readline(), await reader.readline())[1] for _ in range(int(line[1:]))]
                    writer.write(b"+OK\r\n" if arguments[0].strip() == b"CLIENT" else answer + b"\r\n")
            writer.close()

        path = tmp_path / "s"
        async with await asyncio.start_unix_server(refuse, path):
            store = RedisStore.from_url(f"unix://{path}", ConnectionOptions(retries=0))
            replica = new_replica(on=store, store_budget_s=5, write_budget_s=5)
            async with asyncio.timeout(LIMIT_S):
                for _ in range(2):
                    await replica.ask(LIST)
                    await settle(replica)
            await replica.cache.close()
        assert sum(replica.stats.store_errors.values()) >= 1
        assert reason is None or set(replica.stats.store_errors) == {reason}
        assert replica.calls == 1  # memory goes on


class TestBetweenCommands:
    async def test_a_list_entry_evicted_after_it_was_written(self, new_replica: NewReplica, admin: redis.Redis) -> None:
        """Without its list entry a list is put together from its labels."""
        await seen_twice(new_replica, LIST)
        admin.delete(*admin.keys("*:list:*"))
        assert (await new_replica().ask(LIST)).source == "labels"

    async def test_labels_evicted_between_list_and_labels(
        self, new_replica: NewReplica, admin: redis.Redis, between: Between
    ) -> None:
        """Labels that are evicted after the list was looked up are encoded, and only those."""
        await seen_twice(new_replica, LIST)
        admin.delete(*admin.keys("*:list:*"))
        gone = admin.keys("*:label:*")[:10]

        async def evict(call: int) -> None:
            if call == 2:
                admin.delete(*gone)

        between.before = evict
        replica = new_replica(on=between)
        got = await replica.ask(LIST)
        assert (got.hits, len(replica.encoded)) == (67, 10)

    async def test_labels_evicted_before_who_waits_has_seen_them(
        self, new_replica: NewReplica, admin: redis.Redis, between: Between, until: Until
    ) -> None:
        """Labels that another replica wrote and that were evicted before the next look are taken over."""
        holding, waiting = new_replica(), new_replica(on=between)
        holding.gate.clear()
        first = asyncio.create_task(holding.ask(LIST))
        await holding.asked.wait()

        async def evict(call: int) -> None:
            if waiting.stats.lock_waits:
                between.before = None
                holding.gate.set()
                await first
                await settle(holding)
                assert admin.delete(*admin.keys("*:label:*")) == 77

        between.before = evict
        await waiting.ask(LIST)
        assert waiting.stats.lock_takeovers == 77

    async def test_everything_evicted_at_any_moment(
        self, new_replica: NewReplica, admin: redis.Redis, between: Between
    ) -> None:
        """With the server emptied before any one of the calls that a request makes, the answer is the same."""
        for moment in range(1, 16):
            await seen_twice(new_replica, LIST[:10])
            start = between.calls

            async def evict(call: int, moment: int = moment, start: int = start) -> None:
                if call - start == moment:
                    admin.flushall()

            between.before = evict
            replica = new_replica(on=between, ttl_s=1e-3 if moment % 2 else 60)  # due for a refresh at once, or not
            for _ in range(3):
                await replica.ask(LIST[:12])
                await settle(replica)

    async def test_reads_that_are_cut_off(self, new_replica: NewReplica, server: EmbeddedServer) -> None:
        """Requests whose time ends in the middle of a read leave no bytes behind for those that use the store next."""
        long_lists = [[f"{prefix} {i}" for i in range(2_000)] for prefix in "ab"]
        for descriptions in long_lists:
            await seen_twice(new_replica, descriptions)
        store = RedisStore.from_url(server.url, ConnectionOptions(read_timeout_s=60))
        patient = new_replica(on=store, memory_bytes=0)
        for i in range(8):
            hasty = new_replica(on=store, memory_bytes=0, store_budget_s=0.0002 * 2**i, lock_wait_s=0)
            await asyncio.gather(hasty.ask(long_lists[0]), patient.ask(LIST[:3]))
            assert (await patient.ask(long_lists[1])).source == "list"

    @pytest.mark.parametrize("kind", ["list", "label"])
    async def test_a_huge_value(self, new_replica: NewReplica, admin: redis.Redis, kind: str) -> None:
        """50 MB of somebody else's at one of our keys are a counted miss, and are overwritten."""
        await seen_twice(new_replica, LIST)
        [key, *_] = admin.keys(f"*:{kind}:*")
        before = admin.get(key)
        if kind == "label":
            admin.delete(*admin.keys("*:list:*"))
        admin.set(key, bytes(50_000_000))
        replica = new_replica()
        await replica.ask(LIST)
        await settle(replica)
        tier = replica.stats.lists if kind == "list" else replica.stats.labels
        assert tier.misses["magic"] == 1
        assert admin.get(key) == before
        assert replica.stats.memory.held_bytes < 100_000


class TestModels:
    async def test_two_models_side_by_side(self, new_replica: NewReplica) -> None:
        """During a rollout replicas of both models use one store, each finds its own rows, and nobody another's."""
        for round_ in range(3):
            for fingerprint in ("old", "new"):
                replica = new_replica(fingerprint=fingerprint)
                got = await replica.ask(LIST)
                assert got.hits == (0 if round_ == 0 else 77)
                await settle(replica)

    async def test_rows_that_are_not_finite_are_never_written(
        self, new_replica: NewReplica, admin: redis.Redis
    ) -> None:
        """NaN from an encoder leaves nothing in the store but what says nothing, and keeps nobody waiting."""
        replica, other = new_replica(lock_ttl_s=3_600), new_replica()
        encode = replica.cache._own.encode

        async def broken(descriptions: list[str]) -> LabelRows:
            rows = await encode(descriptions)
            values = rows.values.copy()
            values[-1, -1] = np.nan
            return LabelRows(values, rows.lengths)

        replica.cache._own = replace(replica.cache._own, encode=broken)
        with pytest.raises(NumericalError):
            await replica.cache.get(LIST)
        await settle(replica)
        assert admin.keys("*") == []
        assert (await other.ask(LIST)).source == "encoder"
        assert other.stats.lock_waits == 0


class TestClocks:
    async def test_a_clock_that_jumps(self, new_replica: NewReplica) -> None:
        """A clock that leaps ahead, or back, costs at most a refresh, early or late, and no encoding."""
        now = 1e6
        replica = new_replica(clock=lambda: now, ttl_s=1_000)
        await replica.ask(LIST)
        await settle(replica)
        for now in (1e12, -1e12, 0.0, 1e6, 1e9):
            for _ in range(3):
                assert (await replica.ask(LIST)).source == "memory"
            await settle(replica)
            assert (await new_replica(clock=lambda now=now: now, ttl_s=1_000).ask(LIST)).hits == 77
        assert replica.calls == 1
        assert replica.stats.refreshes <= 5

    def test_nobody_reads_the_wall_clock(self) -> None:
        """No module of the cache asks what time it is, so that nobody who sets the time can change what it does."""
        folder = Path(deploy.label_cache.__file__).parent
        modules = list(folder.glob("*.py"))
        assert len(modules) > 10
        for path in modules:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                    assert node.attr in {"monotonic", "perf_counter", "sleep"}, path.name
                if isinstance(node, ast.ImportFrom):
                    assert node.module not in {"time", "datetime"}, path.name
                if isinstance(node, ast.Import):
                    assert "datetime" not in {alias.name for alias in node.names}, path.name


class TestBounds:
    async def test_a_full_memory_tier(self, new_replica: NewReplica) -> None:
        """With memory for one list of three, answers come from the store, and nothing is encoded twice."""
        replica = new_replica(memory_bytes=12_000)
        lists = [[f"{prefix} {i}" for i in range(100)] for prefix in "abc"]
        for _ in range(4):
            for descriptions in lists:
                await replica.ask(descriptions)
                await settle(replica)
                assert replica.stats.memory.held_bytes <= 12_000
        assert len(replica.encoded) == 300
        assert replica.stats.memory.evictions >= 9
        assert replica.stats.lists.hits >= 6

    async def test_one_new_label_in_a_thousand(self, new_replica: NewReplica) -> None:
        """A known list of 1,000 with one new label costs another replica one encoding, and a permuted one none."""
        known = [f"label {i}" for i in range(1_000)]
        await seen_twice(new_replica, known)
        replica = new_replica()
        got = await replica.ask([*known[500:], "new", *known[:500]])
        assert (got.hits, replica.encoded) == (1_000, ["new"])
        await replica.ask(known[::-1])
        assert replica.encoded == ["new"]

    async def test_what_a_request_sends_the_store(self, new_replica: NewReplica, admin: redis.Redis) -> None:
        """A list in memory sends the store nothing, one that it has takes one command, as the store itself counts."""
        await seen_twice(new_replica, LIST)
        replica = new_replica()
        await replica.cache._access._store.ping()
        admin.config_resetstat()
        assert (await replica.ask(LIST)).source == "list"
        assert _commands(admin) == {"getrange": 1}
        assert replica.stats.store_round_trips == 1
        for i in range(20):
            assert (await replica.ask(LIST[i:] + LIST[:i])).source == "memory"
        await settle(replica)
        assert _commands(admin) == {"getrange": 1}

    @pytest.mark.parametrize("variations", [150, pytest.param(10_000, marks=pytest.mark.nightly)])
    async def test_one_off_variations(self, new_replica: NewReplica, admin: redis.Redis, variations: int) -> None:
        """Many variations of a long list, each asked for once, leave no list entry, and cost a label each."""
        known = [f"label {i}" for i in range(100)]
        replica = new_replica(memory_bytes=MIB)
        await replica.ask(known)
        for i in range(variations):
            await replica.ask([*known, f"own {i}"])
        await settle(replica)
        assert admin.keys("*:list:*") == []
        assert len(admin.keys("*:label:*")) == 100 + variations
        assert len(replica.encoded) == 100 + variations
        assert replica.stats.memory.held_bytes <= MIB
        assert admin.keys("*:lock:*") == []


def _commands(admin: redis.Redis) -> dict[str, int]:
    """How often each command was called that isn't about connections or by `admin`."""
    ignored = {"client", "config", "info", "ping", "select", "auth", "hello", "command"}
    found: dict[str, Any] = admin.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): int(value["calls"]) for name, value in found.items()}
    return {name: count for name, count in calls.items() if name.split("|")[0] not in ignored}
