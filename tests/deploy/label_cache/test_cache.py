"""Exact in every path, one encoding per label, and never broken by its store."""

import asyncio
import contextvars
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from deploy.label_cache import (
    CachedLabels,
    EmbeddedServer,
    LabelCache,
    LabelEncodingError,
    LabelRows,
    MemoryStore,
    RedisStore,
    Store,
    StoreError,
)
from deploy.label_cache.cache import MAX_BACKGROUND
from tokenalign.errors import NumericalError

WIDTH = 4
MIB = 2**20
LIST = ["top up failed", "card arrival", "exchange rate"]


class Encoder:
    """Rows that depend on the description alone; counts what it is asked, and can be held up or made to fail."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.replace: Callable[[LabelRows], LabelRows] = lambda rows: rows

    async def __call__(self, descriptions: list[str]) -> LabelRows:
        self.calls.append(list(descriptions))
        self.asked.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.replace(LabelRows.join([self.rows_of(description) for description in descriptions]))

    @staticmethod
    def rows_of(description: str) -> LabelRows:
        seed = int.from_bytes(hashlib.sha256(description.encode()).digest()[:8], "big")
        values = np.random.default_rng(seed).standard_normal((1 + seed % 5, WIDTH)).astype(np.float32)
        if description.startswith("huge"):
            values *= 1e6
        return LabelRows(values, np.array([len(values)], dtype=np.int32))

    @property
    def encoded(self) -> int:
        return sum(map(len, self.calls))


class Spy:
    """A store in memory that records each call and the entries written, and can fail or hang by a method's name."""

    def __init__(self) -> None:
        self.inner = MemoryStore(64 * MIB)
        self.calls: list[tuple[str, list[str]]] = []
        self.lives_s: list[float] = []
        self.written: dict[str, bytes] = {}
        self.errors: dict[str, StoreError] = {}
        self.hang: Callable[[str, int], bool] = lambda method, number: False
        self.goes_on = asyncio.Event()

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        await self._before("get_many", keys)
        return await self.inner.get_many(keys)

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        await self._before("set_many", list(values))
        self.lives_s.append(ttl_s)
        self.written.update(values)
        await self.inner.set_many(values, ttl_s)

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        await self._before("touch_many", keys)
        self.lives_s.append(ttl_s)
        return await self.inner.touch_many(keys, ttl_s)

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        await self._before("set_if_absent_many", list(values))
        absent = await self.inner.set_if_absent_many(values, ttl_s)
        entries = {key: values[key] for key, new in zip(values, absent, strict=True) if new and ":lock:" not in key}
        if entries:
            self.lives_s.append(ttl_s)
            self.written.update(entries)
        return absent

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        await self._before("delete_if_equal_many", list(values))
        return await self.inner.delete_if_equal_many(values)

    async def set_forever(self, key: str, value: bytes) -> None:
        raise AssertionError("the cache keeps nothing for ever")

    async def delete(self, key: str) -> bool:
        raise AssertionError("the cache deletes nothing but its own locks")

    async def ping(self) -> None:
        await self._before("ping", [])

    async def close(self) -> None:
        await self._before("close", [])

    async def _before(self, method: str, keys: Sequence[str]) -> None:
        self.calls.append((method, list(keys)))
        if method in self.errors:
            raise self.errors[method]
        if self.hang(method, sum(name == method for name, _ in self.calls)):
            await self.goes_on.wait()

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    def keys(self, kind: str) -> list[str]:
        return sorted(key for key in self.written if f":{kind}:" in key)

    async def damage(self, kind: str, change: Callable[[bytes], bytes]) -> None:
        await self.inner.set_many({key: change(self.written[key]) for key in self.keys(kind)}, 3_600)


def a_cache(store: Store | None, encoder: Encoder, **options: Any) -> LabelCache:
    return LabelCache(store, encoder, **{"width": WIDTH, "fingerprint": "f1", **options})


def assert_same(got: CachedLabels, descriptions: Sequence[str]) -> None:
    """The rows are those of `descriptions`, in that order, as one trip through float16 leaves them, bit for bit."""
    parts = []
    for description in descriptions:
        rows = Encoder.rows_of(description)
        parts.append(
            rows if description.startswith("huge") else LabelRows(rows.values.astype(np.float16), rows.lengths)
        )
    expected = LabelRows.join(parts)
    assert got.rows.values.dtype == expected.values.dtype
    assert got.rows.values.tobytes() == expected.values.tobytes()
    assert got.rows.lengths.tolist() == expected.lengths.tolist()


async def seen_twice(store: Store, descriptions: Sequence[str] = LIST) -> None:
    """Leaves list and label entries of `descriptions` in the store."""
    for _ in range(2):
        replica = a_cache(store, Encoder())
        await replica.get(descriptions)
        await replica.drain()


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture
def spy() -> Spy:
    return Spy()


class TestLookUp:
    async def test_every_path_gives_the_same_numbers(self, spy: Spy) -> None:
        """Fresh, from memory, from label entries and from the list entry, the rows are the same bit for bit."""
        sources = []
        for _ in range(3):
            replica = a_cache(spy, Encoder())
            for _ in range(2):
                got = await replica.get(LIST)
                assert_same(got, LIST)
                sources.append((got.source, got.hits))
            await replica.drain()
        assert sources == [("encoder", 0), ("memory", 3), ("list", 3), ("memory", 3), ("list", 3), ("memory", 3)]

    async def test_labels_known_from_another_list_are_put_together(self, spy: Spy, encoder: Encoder) -> None:
        """A list whose labels are all known from others costs no encoding."""
        replica = a_cache(spy, Encoder())
        await replica.get([*LIST, "another"])
        await replica.drain()
        got = await a_cache(spy, encoder).get(LIST)
        assert_same(got, LIST)
        assert (got.source, got.hits, encoder.calls) == ("labels", 3, [])

    async def test_one_new_label_in_a_thousand_costs_one(self, spy: Spy, encoder: Encoder) -> None:
        """A known list of 1,000 with one label exchanged has one label encoded."""
        known = [f"label {i}" for i in range(1_000)]
        replica = a_cache(spy, encoder)
        await replica.get(known)
        await replica.drain()
        changed = [*known[:500], "new", *known[501:]]
        got = await replica.get(changed)
        assert_same(got, changed)
        assert encoder.calls[1:] == [["new"]]
        assert got.hits == 999

    async def test_a_permuted_list_costs_none(self, spy: Spy, encoder: Encoder) -> None:
        """Order changes the answer's order and nothing else, in memory and in the store."""
        await seen_twice(spy)
        spy.calls.clear()
        replica = a_cache(spy, encoder)
        for order in (LIST[::-1], LIST[1:] + LIST[:1]):
            assert_same(await replica.get(order), order)
        assert encoder.calls == []
        assert spy.methods == ["get_many"]

    async def test_repeats_are_answered_each(self, encoder: Encoder) -> None:
        """A description asked for twice is encoded once and answered twice."""
        asked = ["b", "a", "b"]
        replica = a_cache(None, encoder)
        assert_same(await replica.get(asked), asked)
        assert encoder.calls == [["a", "b"]]
        assert (await replica.get(asked)).hits == 3

    async def test_round_trips(self, spy: Spy, encoder: Encoder) -> None:
        """A list in memory sends the store nothing; one that the store has takes one round trip."""
        await seen_twice(spy)
        spy.calls.clear()
        replica = a_cache(spy, encoder)
        for _ in range(5):
            await replica.get(LIST)
        await replica.drain()
        assert spy.methods == ["get_many"]
        assert len(spy.calls[0][1]) == 1
        assert replica.stats.store_round_trips == 1

    async def test_a_list_that_fits_float32_only_is_the_same_everywhere(self, spy: Spy) -> None:
        """A label beyond float16 makes its lists float32, and no other label's numbers different."""
        mixed, plain = ["huge label", *LIST], LIST
        for _ in range(3):
            replica = a_cache(spy, Encoder())
            for descriptions in (mixed, plain, mixed):
                assert_same(await replica.get(descriptions), descriptions)
            await replica.drain()
        assert len(spy.keys("list")) == 2

    async def test_nothing_asked_is_an_error(self, encoder: Encoder) -> None:
        """A list needs at least one description."""
        with pytest.raises(ValueError, match="at least one"):
            await a_cache(None, encoder).get([])

    async def test_fingerprint_and_namespace_keep_entries_apart(self, spy: Spy, encoder: Encoder) -> None:
        """Another model's, or another tenant's, rows are never found."""
        await seen_twice(spy)
        for options in ({"fingerprint": "f2"}, {"namespace": "other"}):
            got = await a_cache(spy, encoder, **options).get(LIST)
            assert (got.source, got.hits) == ("encoder", 0)

    async def test_answers_are_read_only(self, encoder: Encoder) -> None:
        """Rows that later requests get too can't be changed by one of them."""
        got = await a_cache(None, encoder).get(sorted(LIST))
        with pytest.raises(ValueError, match="read-only"):
            got.rows.values[0, 0] = 1


class TestListEntries:
    async def test_the_first_time_leaves_labels_and_a_mark(self, spy: Spy, encoder: Encoder) -> None:
        """A list asked for once is not stored as a whole."""
        replica = a_cache(spy, encoder)
        await replica.get(LIST)
        await replica.drain()
        assert [len(spy.keys(kind)) for kind in ("list", "label", "seen")] == [0, 3, 1]

    async def test_the_second_time_by_the_same_replica_writes_it(self, spy: Spy, encoder: Encoder) -> None:
        """A list found in memory for the first time is stored, in the background."""
        replica = a_cache(spy, encoder)
        for _ in range(3):
            await replica.get(LIST)
            await replica.drain()
        assert len(spy.keys("list")) == 1
        assert spy.methods[-2:] == ["touch_many", "set_many"]
        assert encoder.encoded == 3

    async def test_the_second_time_by_another_replica_writes_it(self, spy: Spy, encoder: Encoder) -> None:
        """A replica that finds the mark stores the list, and the label entries are left alone."""
        await seen_twice(spy)
        assert len(spy.keys("list")) == 1
        assert [len(keys) for method, keys in spy.calls if method == "set_many"] == [3, 1]

    async def test_one_off_variations_store_no_list(self, spy: Spy, encoder: Encoder) -> None:
        """Fifty variations of one list cost a mark and at most one label each."""
        known = [f"label {i}" for i in range(50)]
        replica = a_cache(spy, encoder)
        for i in range(50):
            await replica.get([*known[:i], *known[i + 1 :]])
            await replica.get([*known, f"extra {i}"])
        await replica.drain()
        assert [len(spy.keys(kind)) for kind in ("list", "label", "seen")] == [0, 100, 100]
        assert encoder.encoded == 100

    async def test_a_list_too_large_for_memory_still_gets_its_entry(self, spy: Spy, encoder: Encoder) -> None:
        """With no room in memory at all, the second request stores the list and the third takes it."""
        replica = a_cache(spy, encoder, memory_bytes=0)
        sources = []
        for _ in range(3):
            sources.append((await replica.get(LIST)).source)
            await replica.drain()
        assert sources == ["encoder", "labels", "list"]


class TestKeep:
    @pytest.mark.parametrize("memory_bytes", [MIB, 0])
    async def test_everything_is_in_the_store_at_once(self, spy: Spy, encoder: Encoder, memory_bytes: int) -> None:
        """After the first call, list and labels are there for another replica, and nothing is under way any more."""
        descriptions = [*LIST, LIST[0]]
        got = await a_cache(spy, encoder, memory_bytes=memory_bytes).keep(descriptions)
        assert_same(got, descriptions)
        assert (len(spy.keys("list")), len(spy.keys("label"))) == (1, 3)
        spy.calls.clear()
        other = await a_cache(spy, Encoder()).get(LIST)
        assert_same(other, LIST)
        assert (other.source, spy.methods) == ("list", ["get_many"])

    async def test_each_entry_is_written_once(self, spy: Spy, encoder: Encoder) -> None:
        """Entries that are on their way are waited for, not written again, and not counted as lost."""
        replica = a_cache(spy, encoder)
        await replica.keep(LIST)
        await replica.drain()
        written = [key for method, keys in spy.calls if method == "set_many" for key in keys]
        assert len(written) == len(set(written))
        assert replica.stats.labels.evictions == replica.stats.lists.evictions == 0

    async def test_what_the_store_lost_is_written_again(self, spy: Spy, encoder: Encoder) -> None:
        """A list that is kept in memory alone gets its entries back, and costs no encoding."""
        replica = a_cache(spy, encoder)
        await replica.keep(LIST)
        spy.inner = MemoryStore(64 * MIB)
        got = await replica.keep(LIST)
        assert (got.hits, encoder.encoded) == (3, 3)
        assert (await a_cache(spy, Encoder()).get(LIST)).source == "list"

    @pytest.mark.parametrize("method", ["get_many", "set_many", "touch_many"])
    async def test_a_store_that_fails_is_no_error(self, spy: Spy, encoder: Encoder, method: str) -> None:
        """The rows come all the same, and the failure is counted."""
        spy.errors[method] = StoreError("oom", "full")
        replica = a_cache(spy, encoder)
        assert_same(await replica.keep(LIST), LIST)
        assert replica.stats.store_errors["oom"] > 0

    async def test_without_a_store(self, encoder: Encoder) -> None:
        """Where there is no store, it is kept in memory alone."""
        replica = a_cache(None, encoder)
        await replica.keep(LIST)
        assert (await replica.get(LIST)).source == "memory"


class TestSingleFlight:
    async def test_concurrent_first_requests_encode_once(self, spy: Spy, encoder: Encoder) -> None:
        """A hundred requests for a new list, in any order, cost one encoding and one look-up."""
        replica = a_cache(spy, encoder)
        orders = [LIST[i % 3 :] + LIST[: i % 3] for i in range(100)]
        answers = await asyncio.gather(*(replica.get(order) for order in orders))
        for got, order in zip(answers, orders, strict=True):
            assert_same(got, order)
        assert encoder.calls == [sorted(LIST)]
        assert replica.stats.shared_flights == 99
        await replica.drain()

    async def test_a_cancelled_caller_leaves_alone(self, encoder: Encoder) -> None:
        """The first caller's cancellation doesn't reach the others who wait for the same list."""
        encoder.gate.clear()
        replica = a_cache(None, encoder)
        first, second = (asyncio.create_task(replica.get(LIST)) for _ in range(2))
        await encoder.asked.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        encoder.gate.set()
        assert_same(await second, LIST)
        assert len(encoder.calls) == 1

    async def test_work_whose_callers_all_left_is_kept(self, encoder: Encoder) -> None:
        """What was begun is finished, so that a caller who tries again finds it."""
        encoder.gate.clear()
        replica = a_cache(None, encoder)
        caller = asyncio.create_task(replica.get(LIST))
        await encoder.asked.wait()
        caller.cancel()
        encoder.gate.set()
        await replica.drain()
        assert (await replica.get(LIST)).source == "memory"

    async def test_an_error_reaches_everybody_and_is_not_kept(self, spy: Spy, encoder: Encoder) -> None:
        """All who wait get the encoder's error; the next request tries again."""
        replica = a_cache(spy, encoder)
        encoder.error = RuntimeError("encoder is gone")
        answers = await asyncio.gather(*(replica.get(LIST) for _ in range(5)), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["encoder is gone"] * 5
        assert spy.written == {}
        encoder.error = None
        assert_same(await replica.get(LIST), LIST)
        assert len(encoder.calls) == 2

    async def test_an_error_that_nobody_waits_for_is_no_warning(self, encoder: Encoder) -> None:
        """A failed look-up whose caller left is not reported as an exception that was never retrieved."""
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        encoder.gate.clear()
        encoder.error = RuntimeError("encoder is gone")
        replica = a_cache(None, encoder)
        caller = asyncio.create_task(replica.get(LIST))
        await encoder.asked.wait()
        caller.cancel()
        encoder.gate.set()
        await replica.drain()
        del caller, replica
        assert complaints == []

    async def test_a_flight_has_nobodys_context(self) -> None:
        """Context variables of the first caller, such as a request id or a deadline, don't reach the shared work."""
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
        seen: list[str | None] = []

        async def encode(descriptions: list[str]) -> LabelRows:
            seen.append(variable.get(None))
            return LabelRows.join([Encoder.rows_of(d) for d in descriptions])

        variable.set("the first caller's")
        await LabelCache(None, encode, width=WIDTH, fingerprint="f1").get(LIST)
        assert seen == [None]

    async def test_a_cancelled_encoding_is_an_error_and_no_cancellation(self, encoder: Encoder) -> None:
        """Callers who were not cancelled never get a CancelledError."""
        encoder.error = asyncio.CancelledError()
        with pytest.raises(LabelEncodingError, match="cancelled"):
            await a_cache(None, encoder).get(LIST)

    async def test_two_lists_fly_side_by_side(self, encoder: Encoder) -> None:
        """A list that is held up doesn't hold up another."""
        replica = a_cache(None, encoder)
        encoder.gate.clear()
        slow = asyncio.create_task(replica.get(LIST))
        await encoder.asked.wait()
        held_up, encoder.gate = encoder.gate, asyncio.Event()
        encoder.gate.set()
        assert_same(await replica.get(["other"]), ["other"])
        assert not slow.done()
        held_up.set()
        assert_same(await slow, LIST)


class TestBadRows:
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    async def test_rows_that_are_not_finite_are_an_error_and_are_kept_nowhere(
        self, spy: Spy, encoder: Encoder, bad: float
    ) -> None:
        """A defective encoder's NaN reaches neither a score nor memory nor the store."""
        rows = Encoder.rows_of("a")
        rows.values[0, 0] = bad
        encoder.replace = lambda _: rows
        replica = a_cache(spy, encoder)
        with pytest.raises(NumericalError):
            await replica.get(["a"])
        await replica.drain()
        assert spy.written == {}
        encoder.replace = lambda good: good
        assert_same(await replica.get(["a"]), ["a"])

    @pytest.mark.parametrize(
        "rows",
        [
            LabelRows(np.zeros((2, WIDTH), np.float16), np.array([2], np.int32)),
            LabelRows(np.zeros((3, WIDTH + 1), np.float16), np.array([1, 1, 1], np.int32)),
        ],
    )
    async def test_rows_of_another_shape_are_an_error(self, encoder: Encoder, rows: LabelRows) -> None:
        """One description too few, or another width, is never zipped to the wrong label."""
        encoder.replace = lambda _: rows
        with pytest.raises(LabelEncodingError, match="the encoder gave"):
            await a_cache(None, encoder).get(LIST)


class TestBadEntries:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda data: data[:3], "short"),
            (lambda data: data[:-1], "length"),
            (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "checksum"),
            (lambda data: data[:4] + b"\x09" + data[5:], "version"),
            (lambda data: b"\x80\x05K\x01." + bytes(60), "magic"),
            (lambda data: bytes(50 * MIB), "magic"),
        ],
    )
    @pytest.mark.parametrize("kind", ["list", "label"])
    async def test_damaged_entries_are_counted_misses_and_are_overwritten(
        self, spy: Spy, encoder: Encoder, kind: str, change: Callable[[bytes], bytes], reason: str
    ) -> None:
        """Truncated, flipped, of another version, foreign, or huge: the answer is right and the entry whole again."""
        descriptions = ["a"]
        await seen_twice(spy, descriptions)
        before = dict(spy.written)
        await spy.damage(kind, change)
        if kind == "label":
            await spy.inner.set_many(dict.fromkeys(spy.keys("list"), b""), 1)
        else:  # the mark may have ended before the list entry: that it was there is enough to write it again
            await spy.inner.set_many(dict.fromkeys(spy.keys("seen"), b""), 1e-9)
        replica = a_cache(spy, encoder)

        assert_same(await replica.get(descriptions), descriptions)

        await replica.drain()
        tier = replica.stats.lists if kind == "list" else replica.stats.labels
        assert tier.misses[reason] == 1
        assert await spy.inner.get_many(spy.keys(kind)) == [before[key] for key in spy.keys(kind)]
        assert (await a_cache(spy, encoder).get(descriptions)).source == "list"

    async def test_a_value_of_another_key_is_refused(self, spy: Spy, encoder: Encoder) -> None:
        """Two labels whose entries were exchanged keep their own rows."""
        pair = ["a", "a twin"]
        while len({len(Encoder.rows_of(d).values) for d in pair}) > 1:
            pair[1] += "!"  # of as many rows, so that only the key tells them apart
        replica = a_cache(spy, Encoder())
        await replica.get(pair)
        await replica.drain()
        first, second = spy.keys("label")
        await spy.inner.set_many({first: spy.written[second], second: spy.written[first]}, 3_600)
        replica = a_cache(spy, encoder)
        assert_same(await replica.get(pair), pair)
        assert replica.stats.labels.misses["checksum"] == 2
        await replica.drain()

    async def test_an_entry_without_the_secret_is_refused(self, spy: Spy, encoder: Encoder) -> None:
        """Entries planted by somebody who can write to the store are not used, and those with the secret are."""
        await seen_twice(spy)
        replica = a_cache(spy, encoder, secret=b"secret")
        assert (await replica.get(LIST)).source == "encoder"
        assert (replica.stats.lists.misses["unsigned"], replica.stats.labels.misses["unsigned"]) == (1, 3)
        await replica.drain()
        assert (await a_cache(spy, encoder, secret=b"secret").get(LIST)).source == "list"


class TestFailingStore:
    @pytest.mark.parametrize("reason", ["connect", "timeout", "auth", "loading", "cluster", "unexpected"])
    async def test_a_store_that_can_not_be_read_costs_a_counted_miss(
        self, spy: Spy, encoder: Encoder, reason: Any
    ) -> None:
        """The answer is that of a cold computation, and the counters say why."""
        spy.errors = {"get_many": StoreError(reason, "out of order")}
        replica = a_cache(spy, encoder)
        got = await replica.get(LIST)
        assert_same(got, LIST)
        assert (got.source, got.hits) == ("encoder", 0)
        await replica.drain()
        assert replica.stats.lists.misses == {reason: 1}
        assert replica.stats.labels.misses == {reason: 3}
        assert replica.stats.store_errors == {reason: 1}

    @pytest.mark.parametrize("number", [1, 2])
    async def test_a_store_that_hangs_is_waited_for_within_the_budget(
        self, spy: Spy, encoder: Encoder, number: int
    ) -> None:
        """Whether the first or the second read never returns, the request goes on without the store."""
        spy.hang = lambda method, nth: (method, nth) == ("get_many", number)
        replica = a_cache(spy, encoder, store_budget_s=0.02)
        assert_same(await replica.get(LIST), LIST)
        assert replica.stats.lists.misses == ({"timeout": 1} if number == 1 else {"absent": 1})
        assert replica.stats.labels.misses == {"timeout": 3}
        await replica.drain()

    @pytest.mark.parametrize("reason", ["oom", "readonly"])
    async def test_a_write_that_failed_is_done_later(self, spy: Spy, encoder: Encoder, reason: Any) -> None:
        """After store_retry_s, not before, the next request has labels and list written."""
        now = 0.0
        spy.errors = dict.fromkeys(["set_many", "set_if_absent_many"], StoreError(reason, "no"))
        replica = a_cache(spy, encoder, clock=lambda: now, store_retry_s=30)
        assert_same(await replica.get(LIST), LIST)
        await replica.drain()
        assert replica.stats.store_errors == {reason: 3}  # of the locks, the labels and the mark
        spy.errors = {}
        now = 29.0
        await replica.get(LIST)
        await replica.drain()
        assert spy.written == {}
        now = 30.0
        await replica.get(LIST)
        await replica.drain()
        assert [len(spy.keys(kind)) for kind in ("list", "label")] == [1, 3]
        assert (replica.stats.lists.evictions, replica.stats.labels.evictions) == (0, 0)  # they were never there

    async def test_a_mark_that_was_written_does_not_hurry_the_labels(self, spy: Spy, encoder: Encoder) -> None:
        """Labels whose write failed wait for store_retry_s, also when the list's mark was written after it."""
        now = 0.0
        spy.errors = {"set_many": StoreError("oom", "no")}
        replica = a_cache(spy, encoder, clock=lambda: now, store_retry_s=30)
        for now, refreshes in ((0.0, 0), (29.0, 0), (30.0, 1)):  # noqa: B007  read by the clock
            await replica.get(LIST)
            await replica.drain()
            assert replica.stats.refreshes == refreshes
        assert len(spy.keys("seen")) == 1

    async def test_writes_under_way_are_bounded(self, spy: Spy, encoder: Encoder) -> None:
        """A store that takes no writes holds at most MAX_BACKGROUND of them; further ones are skipped and counted."""
        spy.hang = lambda method, nth: method == "set_many"
        replica = a_cache(spy, encoder, store_budget_s=60, write_budget_s=60)
        for i in range(MAX_BACKGROUND + 5):
            assert_same(await replica.get([f"label {i}"]), [f"label {i}"])
        assert len(replica._background.tasks) <= MAX_BACKGROUND
        assert spy.methods.count("set_many") <= MAX_BACKGROUND
        assert replica.stats.skipped_writes >= 5
        spy.goes_on.set()
        await replica.drain()
        assert replica.stats.store_errors == {}

    async def test_a_store_that_is_gone_does_not_flood_the_log(
        self, spy: Spy, encoder: Encoder, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A hundred failures in a row are counted each and logged once; after a recovery, once more."""
        replica = a_cache(spy, encoder)
        with caplog.at_level(logging.WARNING):
            for spell in range(2):
                spy.errors = {method: StoreError("connect", "refused") for method in ("get_many", "set_many")}
                for i in range(50):
                    await replica.get([f"label {spell} {i}"])
                await replica.drain()
                spy.errors = {}
                await replica.get([f"label {spell}"])
                await replica.drain()
        assert replica.stats.store_errors["connect"] == 200
        assert len(caplog.records) == 2

    async def test_closing_a_broken_store_is_fine(self, spy: Spy, encoder: Encoder) -> None:
        """close() finishes the writes under way and does not raise."""
        spy.errors = {"close": StoreError("connect", "gone")}
        replica = a_cache(spy, encoder)
        await replica.get(LIST)
        await replica.close()
        assert len(spy.keys("label")) == 3
        assert replica.stats.store_errors == {"connect": 1}


class TestLives:
    async def test_lives_are_jittered(self, spy: Spy, encoder: Encoder) -> None:
        """Each write has its own life, at most ttl_jitter shorter than ttl_s."""
        draws = iter([0.0, 0.5, 1.0, 0.25])
        replica = a_cache(spy, encoder, ttl_s=1_000, ttl_jitter=0.2, uniform=lambda: next(draws))
        for label in "ab":  # an entry and a mark each
            await replica.get([label])
            await replica.drain()
        assert spy.lives_s == [1_000, 900, 800, 950]

    async def test_a_list_in_use_is_refreshed_once_per_half_life(self, spy: Spy, encoder: Encoder) -> None:
        """Many requests in half a life cost one refresh of list and labels, and encode nothing."""
        await seen_twice(spy)
        now = 0.0
        replica = a_cache(spy, encoder, ttl_s=1_000, clock=lambda: now)
        await replica.get(LIST)
        spy.calls.clear()
        for now, expected in ((499.0, 0), (500.0, 1), (999.0, 1), (1_000.0, 2)):  # noqa: B007  read by the clock
            for _ in range(10):
                await replica.get(LIST)
            await replica.drain()
            assert spy.methods == ["touch_many"] * expected
        assert replica.stats.refreshes == 2
        assert set(spy.calls[0][1]) == set(spy.keys("list") + spy.keys("label"))
        assert encoder.calls == []

    async def test_a_refresh_brings_back_what_the_store_lost(self, spy: Spy, encoder: Encoder) -> None:
        """Entries that were evicted are written again from memory, byte for byte, and the others left alone."""
        await seen_twice(spy)
        before = dict(spy.written)
        now = 0.0
        replica = a_cache(spy, encoder, ttl_s=1_000, clock=lambda: now)
        await replica.get(LIST)
        lost = [spy.keys("list")[0], spy.keys("label")[1]]
        spy.inner = MemoryStore(64 * MIB)
        await spy.inner.set_many({key: value for key, value in before.items() if key not in lost}, 3_600)
        spy.written.clear()
        now = 500.0
        await replica.get(LIST)
        await replica.drain()
        assert spy.written == {key: before[key] for key in lost}
        assert encoder.calls == []
        assert (replica.stats.lists.evictions, replica.stats.labels.evictions) == (1, 1)

    @pytest.mark.parametrize(
        "options", [{"ttl_jitter": 0.5}, {"ttl_s": 0}, {"store_budget_s": -1}, {"write_budget_s": 0}]
    )
    def test_settings_out_of_bounds_are_named(self, options: dict[str, float]) -> None:
        """The error names the setting and its value."""
        [(name, value)] = options.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            LabelCache(None, None, width=WIDTH, fingerprint="f1", **options)  # type: ignore[arg-type]  # never encodes


class TestMemory:
    async def test_memory_is_bounded(self, encoder: Encoder) -> None:
        """A stream of new lists stays within memory_bytes; what was evicted is computed again."""
        replica = a_cache(None, encoder, memory_bytes=20_000)
        for i in range(200):
            await replica.get([f"label {i}"])
            assert replica.stats.memory.held_bytes <= 20_000
        assert replica.stats.memory.evictions > 100
        assert (await replica.get(["label 199"])).source == "memory"
        assert (await replica.get(["label 0"])).source == "encoder"

    async def test_counters(self, spy: Spy, encoder: Encoder) -> None:
        """Hits, misses and bytes of each tier add up to what was asked."""
        await seen_twice(spy)
        replica = a_cache(spy, encoder)
        await replica.get(LIST)
        await replica.get(LIST)
        await replica.get([*LIST, "new"])
        await replica.drain()
        stats = replica.stats
        assert (stats.memory.hits, stats.memory.misses) == (1, {"absent": 2})
        assert (stats.lists.hits, stats.lists.misses) == (1, {"absent": 1})
        assert (stats.labels.hits, stats.labels.misses) == (3, {"absent": 1})
        assert (stats.encode_calls, stats.encoded_descriptions) == (1, 1)
        assert stats.lists.read_bytes == sum(len(spy.written[key]) for key in spy.keys("list"))
        labels_bytes = sum(len(spy.written[key]) for key in spy.keys("label"))
        assert stats.labels.read_bytes + stats.labels.written_bytes == labels_bytes


class TestRealServer:
    async def test_replicas_share_one_server_and_survive_it(self) -> None:
        """Two replicas encode a list once; with the server killed both answer; when it is back they use it again."""
        with EmbeddedServer() as server:
            encoders = [Encoder(), Encoder()]
            replicas = [
                a_cache(RedisStore.from_url(server.url), encoder, store_budget_s=5, store_retry_s=0)
                for encoder in encoders
            ]
            for replica in replicas:
                assert_same(await replica.get(LIST), LIST)
                await replica.drain()
            assert [encoder.encoded for encoder in encoders] == [3, 0]

            assert server.pid is not None
            os.kill(server.pid, 9)
            while server.alive():
                pass
            for replica in replicas:
                assert_same(await replica.get(["new", *LIST]), ["new", *LIST])
                await replica.drain()
                assert replica.stats.store_errors["connect"] >= 1

            server.restart()
            await replicas[0].get(["newer"])
            await replicas[0].drain()
            assert (await replicas[1].get(["newer"])).source == "labels"
            for replica in replicas:
                await replica.close()
