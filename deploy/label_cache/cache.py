"""Label rows by description: from memory, from the store, and only what is in neither from the encoder.

What is kept, and when:

- *memory*: whole lists, decoded, per replica, bounded in bytes.
- *label entries* in the store: one per description, written as soon as it was encoded.
- *list entries* in the store: a whole list in one value. One is written when a list is asked for the second time, by
  any replica: the first time leaves a mark of one byte instead, because one-off variations of a long list would
  otherwise fill the store with copies of the same rows.

The entries of a list in use have their lives extended in the background, at most once per half life, so that a request
for a list in memory sends the store nothing.
"""

import asyncio
import contextvars
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from deploy.label_cache.codec import CodecError, LabelRows, decode_rows, encode_rows
from deploy.label_cache.keys import CacheKeys
from deploy.label_cache.lru import ByteLru
from deploy.label_cache.stats import CacheStats, TierStats
from deploy.label_cache.store import Store, StoreError
from tokenalign.errors import TokenAlignError

Answer = TypeVar("Answer")
Result = TypeVar("Result")

Encode = Callable[[list[str]], Awaitable[LabelRows]]
"""Gives the rows of descriptions, in their order."""

Source = Literal["memory", "list", "labels", "encoder"]

MAX_BACKGROUND = 64
"""Writes under way at once; beyond, they are skipped and counted, so that a slow store can't hold ever more rows."""

_MARK = b"1"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedLabels:
    """The answer to one request.

    rows: of each description, in the order asked
    hits: how many of the descriptions asked for were in memory or in the store
    source: the furthest place that was needed
    """

    rows: LabelRows
    hits: int
    source: Source


@dataclass(slots=True)
class _Held:
    """A list in memory: its rows in canonical order, and when the store is next to be told that it is in use."""

    rows: LabelRows
    due_at: float


@dataclass(frozen=True, slots=True)
class _Found:
    """What a flight gives to everybody who waits for it, in canonical order."""

    rows: LabelRows
    encoded: frozenset[str]
    source: Source


@dataclass(slots=True)
class _LookUp:
    """What the store knows of a list: its rows, or those of its labels. `listed` says that the list entry is due."""

    rows: LabelRows | None
    labels: list[LabelRows | None]
    listed: bool


class LabelEncodingError(TokenAlignError):
    """The encoder gave no rows, or rows that don't answer what it was asked."""


class LabelCache:
    """Rows of label descriptions, the same bit for bit whether they come from memory, from the store or fresh.

    A store that is slow, full, wrong or gone is never an error: within `store_budget_s` of a request the cache does
    without. Use it from one event loop, and `close` it at the end.
    """

    def __init__(
        self,
        store: Store | None,
        encode: Encode,
        *,
        width: int,
        fingerprint: str,
        namespace: str = "tokenalign",
        memory_bytes: int = 256 * 2**20,
        secret: bytes | None = None,
        ttl_s: float = 7 * 24 * 3600.0,
        ttl_jitter: float = 0.1,
        store_budget_s: float = 0.25,
        write_budget_s: float = 5.0,
        store_retry_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """A cache in front of `encode`, which is only ever asked for distinct descriptions.

        store: None keeps whole lists in memory and nothing else
        width, fingerprint: the length of a row, and the name of all that rows depend on
        secret: with one, entries that weren't written with it are refused
        ttl_jitter: the fraction by which a life may be shorter than `ttl_s`, so that not all end at once
        store_budget_s: what the store may add to one request
        write_budget_s, store_retry_s: the bound of each write in the background, and the pause after one failed
        """
        if not 0 <= ttl_jitter < 0.5:
            raise ValueError(
                f"ttl_jitter is {ttl_jitter}; it must be in [0, 0.5), since a list is refreshed at half its life"
            )
        for name, value in (("ttl_s", ttl_s), ("store_budget_s", store_budget_s), ("write_budget_s", write_budget_s)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        self.stats = CacheStats()
        self._store = store
        self._encode = encode
        self._keys = CacheKeys(namespace, fingerprint)
        self._width = width
        self._secret = secret
        self._ttl_s, self._ttl_jitter = ttl_s, ttl_jitter
        self._store_budget_s, self._write_budget_s, self._store_retry_s = store_budget_s, write_budget_s, store_retry_s
        self._clock, self._uniform = clock, uniform
        self._memory: ByteLru[_Held] = ByteLru(memory_bytes)
        self._flights: dict[str, asyncio.Task[_Found]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._failing: str | None = None

    async def get(self, descriptions: Sequence[str]) -> CachedLabels:
        """The rows of `descriptions`, in that order. At least one; repeats are allowed.

        Raises what `encode` raised, and `NumericalError` when it gave NaN or infinity; neither is kept.
        """
        if not descriptions:
            raise ValueError("no descriptions given; a list needs at least one")
        distinct = sorted(set(descriptions))
        key = self._keys.list(distinct)
        held = self._memory.get(key)
        if held is not None:
            self.stats.memory.hits += 1
            self._keep_in_store(key, distinct, held)
            return CachedLabels(_in_order(held.rows, distinct, descriptions), len(descriptions), "memory")
        self.stats.memory.misses["absent"] += 1
        found = await self._fly(key, distinct)
        hits = sum(description not in found.encoded for description in descriptions)
        return CachedLabels(_in_order(found.rows, distinct, descriptions), hits, found.source)

    async def drain(self) -> None:
        """Returns once no look-up and no write is under way."""
        while pending := [*self._flights.values(), *self._background]:
            await asyncio.wait(pending)

    async def close(self) -> None:
        """Finishes what is under way and closes the store. No `get` may follow."""
        await self.drain()
        if self._store is not None:
            try:
                await self._store.close()
            except StoreError as error:
                self._count_error(error)

    async def _fly(self, key: str, distinct: list[str]) -> _Found:
        """Joins the look-up of this list that is under way, or starts one.

        It is a task of its own, in an empty context: a caller who is cancelled leaves alone, and neither the deadline
        nor the trace of the first caller is the others'.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _task(self._find(key, distinct))
            self._flights[key] = flight
            flight.add_done_callback(lambda done: self._land(key, done))
        else:
            self.stats.shared_flights += 1
        return await asyncio.shield(flight)

    def _land(self, key: str, flight: "asyncio.Task[_Found]") -> None:
        del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # its waiters have it; asked for here in case that all of them left

    async def _find(self, key: str, distinct: list[str]) -> _Found:
        """Looks the list up in the store, encodes what is missing, and keeps what was new."""
        known = await self._look_up(key, distinct)
        if known.rows is not None:
            self._hold(key, known.rows, self._half_life_from_now())
            return _Found(known.rows, frozenset(), "list")
        missing = [i for i, rows in enumerate(known.labels) if rows is None]
        entries: dict[str, bytes] = {}
        if missing:
            fresh, entries = await self._encode_labels([distinct[i] for i in missing])
            for i, label in zip(missing, fresh, strict=True):
                known.labels[i] = label
        rows = LabelRows.join([label for label in known.labels if label is not None])
        held = self._hold(key, rows, self._half_life_from_now() if known.listed else self._clock())
        if self._store is not None:
            self._in_background(held, self._write_found(self._store, key, distinct, held, entries, known.listed))
        return _Found(rows, frozenset(distinct[i] for i in missing), "encoder" if missing else "labels")

    def _hold(self, key: str, rows: LabelRows, due_at: float) -> _Held:
        held = _Held(rows, due_at)
        self._memory.put(key, held, rows.nbytes)
        self.stats.memory.held_bytes = self._memory.held_bytes
        self.stats.memory.evictions = self._memory.evictions
        return held

    # Reading from the store

    async def _look_up(self, key: str, distinct: list[str]) -> _LookUp:
        """What the store gives within its budget; a store that fails has nothing."""
        known = _LookUp(None, [None] * len(distinct), listed=False)
        if self._store is None:
            return known
        deadline = asyncio.get_running_loop().time() + self._store_budget_s
        unread = [(self.stats.lists, 1), (self.stats.labels, len(distinct))]
        try:
            [data] = await self._ask(self._store.get_many([key]), deadline)
            del unread[0]
            [known.rows] = await self._decode([key], [data], len(distinct), self.stats.lists)
            if known.rows is not None:
                return known
            keys = [self._keys.label(description) for description in distinct]
            mark, *entries = await self._ask(self._store.get_many([self._keys.seen(distinct), *keys]), deadline)
        except StoreError as error:
            self._count_error(error)
            for tier, count in unread:
                tier.misses[error.reason] += count
            return known
        self._failing = None
        # A list entry that was refused was written once, so its list is due as much as one that has its mark.
        known.listed = mark is not None or data is not None
        known.labels = await self._decode(keys, entries, 1, self.stats.labels)
        return known

    async def _decode(
        self, keys: list[str], entries: Sequence[bytes | None], descriptions: int, tier: TierStats
    ) -> list[LabelRows | None]:
        """The rows of each entry; None, counted, where it is absent or not intact: then it will be written again."""
        decoded = await asyncio.to_thread(
            lambda: [self._decode_one(key, data, descriptions) for key, data in zip(keys, entries, strict=True)]
        )
        for key, data, rows in zip(keys, entries, decoded, strict=True):
            tier.read_bytes += len(data or b"")
            if isinstance(rows, LabelRows):
                tier.hits += 1
                continue
            reason = "absent" if rows is None else rows.reason
            tier.misses[reason] += 1
            if rows is not None and tier.misses[reason] == 1:
                logger.warning("refused the cache entry %s, and will count others like it: %s", key, rows)
        return [rows if isinstance(rows, LabelRows) else None for rows in decoded]

    def _decode_one(self, key: str, data: bytes | None, descriptions: int) -> LabelRows | CodecError | None:
        if data is None:
            return None
        try:
            return decode_rows(key, data, self._secret, width=self._width, descriptions=descriptions)
        except CodecError as error:
            return error

    # Encoding

    async def _encode_labels(self, missing: list[str]) -> tuple[list[LabelRows], dict[str, bytes]]:
        """The rows of each description after a trip through the codec, and the label entries that these are."""
        self.stats.encode_calls += 1
        self.stats.encoded_descriptions += len(missing)
        try:
            rows = await self._encode(missing)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not we were cancelled but what `encode` waited for; passed on, it would look like the callers' own.
            raise LabelEncodingError(f"the encoding of {len(missing)} label descriptions was cancelled") from error
        if (len(rows), rows.width) != (len(missing), self._width):
            raise LabelEncodingError(
                f"the encoder gave {len(rows)} descriptions of width {rows.width}, "
                f"not {len(missing)} of {self._width}; it is another model, or defective"
            )
        return await asyncio.to_thread(self._through_codec, missing, rows)

    def _through_codec(self, descriptions: list[str], rows: LabelRows) -> tuple[list[LabelRows], dict[str, bytes]]:
        """Each label by itself, since whether one fits float16 must not depend on the others; slow, so in a thread."""
        keys = [self._keys.label(description) for description in descriptions]
        entries = {key: encode_rows(key, label, self._secret) for key, label in zip(keys, rows.split(), strict=True)}
        labels = [decode_rows(key, entries[key], self._secret, width=self._width, descriptions=1) for key in keys]
        return labels, entries

    # Writing to the store, always in the background

    async def _write_found(
        self, store: Store, key: str, distinct: list[str], held: _Held, labels: dict[str, bytes], listed: bool
    ) -> None:
        """Writes new label entries, and with them the list entry where it is due, else the mark."""
        if listed:
            lists = {key: await asyncio.to_thread(encode_rows, key, held.rows, self._secret)}
        else:
            lists = {self._keys.seen(distinct): _MARK}
        await self._write(store, held, lists, labels)

    def _keep_in_store(self, key: str, distinct: list[str], held: _Held) -> None:
        """Starts the upkeep of a list in memory when it is due: on its second sighting, then every half life."""
        if self._store is None or self._clock() < held.due_at:
            return
        held.due_at = self._half_life_from_now()
        self._in_background(held, self._refresh(self._store, key, distinct, held))

    async def _refresh(self, store: Store, key: str, distinct: list[str], held: _Held) -> None:
        """Extends the lives of a list's entries and writes those that the store doesn't have."""
        self.stats.refreshes += 1
        label_keys = [self._keys.label(description) for description in distinct]
        try:
            list_there, *labels_there = await self._ask(
                store.touch_many([key, *label_keys], self._life_s()), self._write_deadline()
            )
        except StoreError as error:
            self._postpone(held, error)
            return
        lost = [i for i, there in enumerate(labels_there) if not there]
        labels: dict[str, bytes] = {}
        if lost:
            _, labels = await asyncio.to_thread(self._through_codec, [distinct[i] for i in lost], held.rows.take(lost))
        lists = {} if list_there else {key: await asyncio.to_thread(encode_rows, key, held.rows, self._secret)}
        if lists or labels:
            await self._write(store, held, lists, labels)

    async def _write(self, store: Store, held: _Held, lists: Mapping[str, bytes], labels: Mapping[str, bytes]) -> None:
        try:
            await self._ask(store.set_many({**labels, **lists}, self._life_s()), self._write_deadline())
        except StoreError as error:
            self._postpone(held, error)
            return
        self.stats.lists.written_bytes += sum(map(len, lists.values()))
        self.stats.labels.written_bytes += sum(map(len, labels.values()))

    def _in_background(self, held: _Held, work: Coroutine[Any, Any, None]) -> None:
        if len(self._background) >= MAX_BACKGROUND:
            work.close()
            self.stats.skipped_writes += 1
            held.due_at = self._clock() + self._store_retry_s
            return
        task = _task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # The store's time and errors

    async def _ask(self, answer: Awaitable[Answer], deadline: float) -> Answer:
        """The store's answer; `StoreError` also when it isn't there at `deadline`, a time of the event loop."""
        self.stats.store_round_trips += 1
        try:
            async with asyncio.timeout_at(deadline):
                return await answer
        except TimeoutError as error:
            raise StoreError("timeout", "the store did not answer within the time that it is given") from error

    def _count_error(self, error: StoreError) -> None:
        """Counts each error, but logs only the first of a kind in a row: a store that is gone fails every request."""
        self.stats.store_errors[error.reason] += 1
        if self._failing != error.reason:
            logger.warning("the label store fails (%s), going on without it: %s", error.reason, error)
        self._failing = error.reason

    def _postpone(self, held: _Held, error: StoreError) -> None:
        """Has a failed write tried again after a pause; one that is too large would only fail again."""
        self._count_error(error)
        pause_s = self._ttl_s / 2 if error.reason == "too_large" else self._store_retry_s
        held.due_at = self._clock() + pause_s

    def _write_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._write_budget_s

    def _life_s(self) -> float:
        return self._ttl_s * (1 - self._ttl_jitter * self._uniform())

    def _half_life_from_now(self) -> float:
        return self._clock() + self._ttl_s / 2


def _task(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def _in_order(rows: LabelRows, distinct: list[str], descriptions: Sequence[str]) -> LabelRows:
    position = {description: i for i, description in enumerate(distinct)}
    return rows.take([position[description] for description in descriptions])
