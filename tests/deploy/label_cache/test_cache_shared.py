"""What many need at once is encoded once, within a replica and across replicas, and no replica depends on another."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.label_cache import EmbeddedServer, MemoryStore, StoreError
from deploy.label_cache.cache import Variant
from deploy.label_cache.keys import CacheKeys

NewReplica = Callable[..., Any]  # see conftest
Until = Callable[[Callable[[], bool]], Any]

MIB = 2**20
LIST = [f"label {i}" for i in range(77)]

PROCESS = """
import asyncio, json, sys
import numpy as np
from deploy.label_cache import LabelCache, LabelRows, RedisStore
from deploy.label_cache.redis_clients import ConnectionOptions

url, requests, hang = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "hang"
labels = [f"label {i}" for i in range(77)]
encoded = []

async def encode(descriptions):
    encoded.extend(descriptions)
    if hang:
        print("encoding", flush=True)
        await asyncio.Event().wait()
    await asyncio.sleep(0.05)
    values = np.repeat(np.array([[float(d.split()[1])] for d in descriptions], np.float32), 8, axis=1)
    return LabelRows(values, np.ones(len(descriptions), np.int32))

async def main():
    store = RedisStore.from_url(url, ConnectionOptions(read_timeout_s=60))
    times = {"store_budget_s": 60, "write_budget_s": 60, "lock_wait_s": 60, "lock_ttl_s": float(sys.argv[4])}
    cache = LabelCache(store, encode, width=8, fingerprint="processes", **times)
    await store.ping()
    print("ready", flush=True)
    sys.stdin.readline()
    answers = await asyncio.gather(*(cache.get(labels[i:] + labels[:i]) for i in range(requests)))
    right = all(got.rows.values[:, 0].tolist() == [*range(i, 77), *range(i)] for i, got in enumerate(answers))
    print(json.dumps({"encoded": encoded, "right": right}), flush=True)
    await cache.close()

asyncio.run(main())
"""


def start_process(server: EmbeddedServer, requests: int, mode: str, lock_ttl_s: float = 60) -> "subprocess.Popen[str]":
    """A replica in a process of its own; it says "ready", and begins when it is sent a line."""
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, server.url, str(requests), mode, str(lock_ttl_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def begin(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


class Recorder(MemoryStore):
    """A store shared by replicas of one process that records what is written and freed, and can fail."""

    def __init__(self) -> None:
        super().__init__(64 * MIB)
        self.calls: list[tuple[str, list[str]]] = []
        self.errors: dict[str, StoreError] = {}

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._check("get_many", keys)
        return await super().get_many(keys)

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        self._check("set_many", list(values))
        await super().set_many(values, ttl_s)

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        self._check("delete_if_equal_many", list(values))
        return await super().delete_if_equal_many(values)

    def _check(self, method: str, keys: Sequence[str]) -> None:
        self.calls.append((method, list(keys)))
        if method in self.errors:
            raise self.errors[method]

    def held_locks(self) -> list[str]:
        return [key for key in list(self._entries._entries) if ":lock:" in key]


class TestWithinAReplica:
    async def test_lists_that_share_labels_encode_these_once(self, new_replica: NewReplica) -> None:
        """Two new lists at once cost each label they have in common one encoding, with no store at all."""
        replica = new_replica(on=None)
        first, second = LIST[:50], LIST[30:]
        await asyncio.gather(replica.ask(first), replica.ask(second), replica.ask(first[::-1]))
        assert sorted(replica.encoded) == sorted(LIST)
        assert replica.stats.encodings_saved == {"flight": 20 + 50}
        assert replica.stats.encoded_descriptions == 77

    async def test_variations_of_a_new_list_at_once(self, new_replica: NewReplica) -> None:
        """Fifty variations of a new list, each with a label of its own, cost one encoding per label."""
        replica = new_replica()
        await asyncio.gather(*(replica.ask([*LIST, f"own {i}"]) for i in range(50)))
        assert len(replica.encoded) == len(set(replica.encoded)) == 77 + 50

    async def test_a_label_is_shared_until_it_is_written(self, new_replica: NewReplica, until: Until) -> None:
        """A list that comes while its labels are on their way to the store neither encodes nor waits for them."""
        store = Recorder()
        written = asyncio.Event()

        async def set_many(values: Mapping[str, bytes], ttl_s: float) -> None:
            if any(":label:" in key for key in values):
                await written.wait()
            await MemoryStore.set_many(store, values, ttl_s)

        store.set_many = set_many  # type: ignore[method-assign]  # a write that takes long
        replica = new_replica(on=store)
        await replica.ask(LIST)
        got = await replica.ask(LIST[:40])
        assert (got.hits, replica.calls, replica.stats.lock_waits) == (0, 1, 0)
        written.set()
        await replica.cache.drain()
        assert len(replica.cache._labels) == 0

    async def test_a_cancelled_caller_cancels_nobody(self, new_replica: NewReplica) -> None:
        """A caller who leaves while labels are encoded for it doesn't take them from another list's callers."""
        replica = new_replica(on=None)
        replica.gate.clear()
        first = asyncio.create_task(replica.ask(LIST[:50]))
        await replica.asked.wait()
        second = asyncio.create_task(replica.ask(LIST[30:50]))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        replica.gate.set()
        await second
        assert len(replica.encoded) == 50

    async def test_an_error_reaches_all_lists_and_is_not_kept(self, new_replica: NewReplica) -> None:
        """Lists that share labels with one whose encoding fails have the error too; later requests are answered."""
        replica = new_replica()
        replica.error = RuntimeError("encoder is gone")
        lists = [LIST[i : i + 20] for i in range(0, 50, 10)]
        answers = await asyncio.gather(*(replica.ask(labels) for labels in lists), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["encoder is gone"] * 5
        replica.error = None
        for labels in lists:
            await replica.ask(labels)
        assert len(replica.cache._labels) == 0 or await replica.cache.drain() is None

    async def test_a_label_that_fails_is_its_own_lists_alone(self, new_replica: NewReplica) -> None:
        """A list that shares labels with one that holds a label which can't be encoded is answered all the same."""
        replica = new_replica()
        encode = replica.cache._own.encode

        async def refuse(descriptions: list[str]) -> Any:
            if "bad" in descriptions:
                await asyncio.sleep(0)
                raise ValueError("bad label")
            return await encode(descriptions)

        replica.cache._own = replace(replica.cache._own, encode=refuse)
        bad = asyncio.create_task(replica.ask([*LIST, "bad"]))
        good = asyncio.create_task(replica.ask(LIST))
        with pytest.raises(ValueError, match="bad label"):
            await bad
        assert (await good).source == "encoder"


class TestVariants:
    async def test_other_rows_have_other_entries(self, new_replica: NewReplica) -> None:
        """Rows of a variant are found under its fingerprint, by whoever has that one, and never under the cache's."""
        replica, other = new_replica(), new_replica(fingerprint="f2")

        variant = Variant("f2", other._encode)
        await replica.ask(LIST)
        first, second = [await replica.cache.get(LIST, None, variant) for _ in range(2)]
        assert (first.source, second.source) == ("encoder", "memory")
        assert (await replica.ask(LIST)).source == "memory"
        assert (replica.calls, other.calls) == (1, 1)
        await replica.cache.drain()
        kept = await other.ask(LIST)  # which compares them with a cold computation
        assert (kept.hits, other.calls) == (len(LIST), 1)
        assert kept.rows.values.tobytes() == first.rows.values.tobytes() == second.rows.values.tobytes()


class TestAcrossReplicas:
    async def test_a_hundred_first_requests_on_four_replicas(
        self, new_replica: NewReplica, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """100 concurrent first requests for 77 labels on 4 replicas that share a server encode each label once."""
        replicas = [new_replica() for _ in range(4)]
        await asyncio.gather(*(replicas[i % 4].ask(LIST[i % 77 :] + LIST[: i % 77]) for i in range(100)))
        encoded = [label for replica in replicas for label in replica.encoded]
        calls = sum(replica.calls for replica in replicas)
        with capsys.disabled():
            print(f"\n100 requests, 77 labels, 4 replicas: {len(encoded)} encodings in {calls} calls")
        assert sorted(encoded) == sorted(LIST)
        for replica in replicas:
            await replica.cache.drain()
            saved = sum(replica.stats.encodings_saved.values())
            assert saved + replica.stats.encoded_descriptions == 25 * 77

    async def test_labels_written_between_look_and_lock(self, new_replica: NewReplica) -> None:
        """A replica that gets a lock just after another one wrote the label and freed it encodes nothing."""
        store = Recorder()
        quick, slow = new_replica(on=store), new_replica(on=store)
        take = slow.cache._access.lock

        async def take_late(*arguments: Any) -> list[bool]:
            await quick.ask(LIST)
            await quick.cache.drain()
            taken: list[bool] = await take(*arguments)
            assert all(taken)
            return taken

        slow.cache._access.lock = take_late
        got = await slow.ask(LIST)
        assert (got.hits, slow.encoded, len(quick.encoded)) == (77, [], 77)
        await slow.cache.drain()
        assert store.held_locks() == []

    async def test_overlapping_lists_on_four_replicas(self, new_replica: NewReplica) -> None:
        """Replicas that ask for different parts of the same labels share the work between them."""
        replicas = [new_replica() for _ in range(4)]
        lists = [LIST[start : start + 40] for start in range(0, 37)]
        await asyncio.gather(*(replicas[i % 4].ask(labels) for i, labels in enumerate(lists)))
        encoded = [label for replica in replicas for label in replica.encoded]
        assert sorted(encoded) == sorted(LIST[:76])

    async def test_four_processes(self, server: EmbeddedServer) -> None:
        """The same holds for replicas in processes of their own."""
        processes = [start_process(server, 25, "run") for _ in range(4)]
        try:
            for process in processes:
                assert line_of(process) == "ready"
            for process in processes:
                begin(process)
            answers = [json.loads(line_of(process)) for process in processes]
        finally:
            for process in processes:
                process.communicate(timeout=60)
        assert all(answer["right"] for answer in answers)
        assert sorted(label for answer in answers for label in answer["encoded"]) == sorted(LIST)

    async def test_a_killed_holder_delays_by_no_more_than_its_locks_life(
        self, new_replica: NewReplica, server: EmbeddedServer, admin: redis.Redis
    ) -> None:
        """After a process was killed in mid-encoding, its locks end by themselves and another replica takes over."""
        process = start_process(server, 1, "hang", lock_ttl_s=3)
        try:
            assert line_of(process) == "ready"
            begin(process)
            assert line_of(process) == "encoding"
            lives_ms = [admin.pttl(key) for key in admin.keys("*:lock:*")]
        finally:
            process.kill()
            process.communicate()
        assert len(lives_ms) == 77
        assert all(0 < life_ms <= 3_000 for life_ms in lives_ms)
        replica, other = (new_replica(fingerprint="processes") for _ in range(2))
        async with asyncio.timeout(30):  # far beyond the locks' lives, far below the wait of 60 s
            await asyncio.gather(replica.ask(LIST), other.ask(LIST))
        assert sorted(replica.encoded + other.encoded) == sorted(LIST)
        assert replica.stats.lock_waits + other.stats.lock_waits >= 77
        assert replica.stats.lock_timeouts + other.stats.lock_timeouts == 0
        assert replica.stats.lock_wait_s + other.stats.lock_wait_s > 0

    async def test_a_holder_that_fails_hands_over(self, new_replica: NewReplica, until: Until) -> None:
        """A replica whose encoder fails frees its locks at once, long before their lives end."""
        failing, waiting = new_replica(lock_ttl_s=3_600), new_replica()
        failing.gate.clear()
        failing.error = RuntimeError("encoder is gone")
        first = asyncio.create_task(failing.ask(LIST))
        await failing.asked.wait()
        second = asyncio.create_task(waiting.ask(LIST))
        await until(lambda: waiting.stats.lock_waits == 77)
        failing.gate.set()
        with pytest.raises(RuntimeError, match="encoder is gone"):
            await first
        await second
        assert waiting.stats.lock_takeovers == 77

    async def test_a_holder_that_hangs_is_waited_for_up_to_a_bound(self, new_replica: NewReplica) -> None:
        """Past lock_wait_s a request encodes for itself, and the counter says so."""
        hanging, waiting = new_replica(), new_replica(lock_wait_s=0.05)
        hanging.gate.clear()
        first = asyncio.create_task(hanging.ask(LIST))
        await hanging.asked.wait()
        got = await waiting.ask(LIST)
        assert (got.source, len(waiting.encoded)) == ("encoder", 77)
        assert (waiting.stats.lock_waits, waiting.stats.lock_timeouts) == (77, 77)
        hanging.gate.set()
        await first

    async def test_without_waiting_there_are_no_locks(self, new_replica: NewReplica) -> None:
        """With lock_wait_s 0 replicas encode beside each other and leave no locks."""
        replicas = [new_replica(on=(store := Recorder()), lock_wait_s=0), new_replica(on=store, lock_wait_s=0)]
        await asyncio.gather(*(replica.ask(LIST) for replica in replicas))
        assert [len(replica.encoded) for replica in replicas] == [77, 77]
        assert store.held_locks() == []

    async def test_rows_are_written_before_their_lock_is_freed(self, new_replica: NewReplica) -> None:
        """Who finds a label's lock free after it was taken finds the label's entry."""
        store = Recorder()
        replica = new_replica(on=store)
        await replica.ask(LIST)
        await replica.cache.drain()
        order = [
            (method, len(keys))
            for method, keys in store.calls
            if (method == "set_many" and ":label:" in keys[0]) or method == "delete_if_equal_many"
        ]
        assert order == [("set_many", 77), ("delete_if_equal_many", 77)]
        assert store.held_locks() == []

    async def test_locks_are_freed_when_the_write_fails(self, new_replica: NewReplica) -> None:
        """A label that could not be written isn't locked any longer than it takes to know that."""
        store = Recorder()
        store.errors = {"set_many": StoreError("oom", "full")}
        replica, other = new_replica(on=store), new_replica(on=store)
        await replica.ask(LIST)
        await replica.cache.drain()
        assert store.held_locks() == []
        await other.ask(LIST)
        assert other.stats.lock_waits == 0

    async def test_a_store_that_fails_meanwhile_ends_the_wait(self, new_replica: NewReplica, until: Until) -> None:
        """A replica that waits for another one when the store fails encodes at once."""
        store = Recorder()
        holding, waiting = new_replica(on=store), new_replica(on=store)
        holding.gate.clear()
        first = asyncio.create_task(holding.ask(LIST))
        await holding.asked.wait()
        second = asyncio.create_task(waiting.ask(LIST))
        await until(lambda: waiting.stats.lock_waits == 77)
        store.errors = {"get_many": StoreError("connect", "gone")}
        await second
        assert (len(waiting.encoded), waiting.stats.store_errors["connect"]) == (77, 1)
        store.errors = {}
        holding.gate.set()
        await first

    async def test_a_late_writer_leaves_another_models_rows_alone(
        self, new_replica: NewReplica, admin: redis.Redis
    ) -> None:
        """A slow replica of the old model writes after one of the new model, under keys of its own."""
        old, new = new_replica(fingerprint="old"), new_replica(fingerprint="new")
        old.gate.clear()
        late = asyncio.create_task(old.ask(LIST))
        await old.asked.wait()
        assert (await new.ask(LIST)).source == "encoder"  # it waits for no lock of the other model's
        await new.cache.drain()
        before = {key: admin.get(key) for key in admin.keys("*:new:*")}
        old.gate.set()
        await late
        await old.cache.drain()
        assert {key: admin.get(key) for key in admin.keys("*:new:*")} == before
        assert len(admin.keys("*:old:label:*")) == len(admin.keys("*:new:label:*")) == 77
        for fingerprint in ("old", "new"):
            assert (await new_replica(fingerprint=fingerprint).ask(LIST)).hits == 77

    async def test_a_replica_that_was_overtaken_writes_the_same_bytes(
        self, new_replica: NewReplica, admin: redis.Redis
    ) -> None:
        """Two replicas that encode the same label after all leave one entry, and it is intact."""
        slow, quick = new_replica(), new_replica(lock_wait_s=0)
        slow.gate.clear()
        late = asyncio.create_task(slow.ask(LIST))
        await slow.asked.wait()
        await quick.ask(LIST)
        await quick.cache.drain()
        before = {key: admin.get(key) for key in admin.keys("*:label:*")}
        slow.gate.set()
        await late
        await slow.cache.drain()
        assert {key: admin.get(key) for key in admin.keys("*:label:*")} == before


class TestTenants:
    async def test_one_tenants_labels_do_not_show_in_anothers_answer(self, new_replica: NewReplica) -> None:
        """Neither memory nor store nor an encoding under way serves another tenant, or those without one."""
        replica, other = new_replica(), new_replica()
        for tenant in ("ada", "bob", None):
            got = await replica.ask(LIST, tenant)
            assert (got.source, got.hits) == ("encoder", 0)
            await replica.cache.drain()
        assert replica.calls == 3
        for tenant in ("ada", "bob", None):
            assert (await replica.ask(LIST, tenant)).source == "memory"
            assert (await other.ask(LIST, tenant)).hits == 77
        assert other.encoded == []

    async def test_tenants_do_not_wait_for_each_other(self, new_replica: NewReplica) -> None:
        """Labels that one tenant has encoded at the moment are encoded for another beside it, here and elsewhere."""
        replica, other = new_replica(), new_replica()
        replica.gate.clear()
        first = asyncio.create_task(replica.ask(LIST, "ada"))
        await replica.asked.wait()
        await other.ask(LIST, "bob")
        replica.asked.clear()
        second = asyncio.create_task(replica.ask([*LIST, "one more"], "cy"))
        await replica.asked.wait()
        assert (replica.calls, other.calls) == (2, 1)
        replica.gate.set()
        await asyncio.gather(first, second)

    def test_keys_hold_a_hash_of_the_tenant(self) -> None:
        """Any words make a tenant; keys show none of them, differ by namespace, and keep their form."""
        plain = CacheKeys("tokenalign", "f1")
        ada = plain.of_tenant("ada: {x}\n")
        assert ada.label("a").split(":")[:3] == ["tokenalign", "1", "f1"]
        assert "ada" not in ada.label("a")
        assert ada.label("a") == plain.of_tenant("ada: {x}\n").label("a")
        assert ada.of_tenant(None).label("a") == plain.label("a")
        assert ada.of_fingerprint("f2") == CacheKeys("tokenalign", "f2", "ada: {x}\n")
        owners = [("a", "bc"), ("ab", "c"), ("a", "b"), ("a", "B"), ("a", None)]
        keys = [CacheKeys(namespace, "f1", tenant) for namespace, tenant in owners]
        hashes = [key.label("x").removeprefix(key.namespace) for key in keys]
        assert len(set(hashes)) == len(owners)

    def test_a_tenant_without_a_name_is_refused(self) -> None:
        """An empty string, as of a header that was not sent, is no tenant."""
        with pytest.raises(ValueError, match="tenant is empty"):
            CacheKeys("tokenalign", "f1").of_tenant("")
