"""Label rows by description: from memory, from the store, and only what is in neither from the encoder.

What is kept, and when:

- *memory*: whole lists, decoded, per replica, bounded in bytes.
- *label entries* in the store: one per description, written as soon as it was encoded.
- *list entries* in the store: a whole list in one value. One is written when a list is asked for the second time, by
  any replica: the first time leaves a mark of one byte instead, because one-off variations of a long list would
  otherwise fill the store with copies of the same rows.

The entries of a list in use have their lives extended in the background, at most once per half life, so that a request
for a list in memory sends the store nothing.

What is needed by many at once is fetched once: requests for the same list share one look-up, lists that share a label
share its fetch, and replicas that share a store leave a label to the one that holds its lock.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deploy.label_cache.access import StoreAccess, StoreTimes
from deploy.label_cache.background import Background, detached
from deploy.label_cache.codec import LabelRows
from deploy.label_cache.entries import Entries
from deploy.label_cache.flights import Batch, Flights
from deploy.label_cache.keys import CacheKeys
from deploy.label_cache.labels import Encode, LabelFetcher, Landed, Request, Wanted
from deploy.label_cache.locks import LockTimes
from deploy.label_cache.lru import ByteLru
from deploy.label_cache.stats import CacheStats
from deploy.label_cache.store import Store, StoreError

Source = Literal["memory", "list", "labels", "encoder"]

MAX_BACKGROUND = 64
"""Writes under way at once; beyond, they are skipped and counted, so that a slow store can't hold ever more rows."""

_MARK = b"1"
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Variant:
    """Another way to make rows of the same width, such as other words around each label.

    fingerprint: the name of all that these rows depend on; their entries are found under it alone
    """

    fingerprint: str
    encode: Encode


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """A list as it was asked for: `distinct` sorted, `key` the one of its list entry; `encode` gives what lacks."""

    keys: CacheKeys
    key: str
    distinct: list[str]
    encode: Encode


@dataclass(slots=True)
class _Upkeep:
    """When the store is next to be told that a list is in use.

    listed: the list entry was written; incomplete: the last write failed, so what is absent was perhaps never there
    """

    due_at: float = _NEVER
    listed: bool = False
    incomplete: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """A list in memory: its rows in canonical order."""

    rows: LabelRows
    upkeep: _Upkeep


ListMemory = ByteLru[str, _Held]
"""Whole lists in memory; caches of several models may share one, since the keys name the model."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a look-up gives to everybody who waits for it, in canonical order."""

    rows: LabelRows
    encoded: frozenset[str]
    source: Source


@dataclass(slots=True)
class _Visit:
    """What the store has of a list.

    damaged: there was an entry, which was refused
    deadline: until when it may be asked for the labels; None when it failed, for `failure`, or when there is no store
    """

    rows: LabelRows | None = None
    damaged: bool = False
    deadline: float | None = None
    failure: str | None = None


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
        memory: ListMemory | None = None,
        secret: bytes | None = None,
        ttl_s: float = 7 * 24 * 3600.0,
        ttl_jitter: float = 0.1,
        store_budget_s: float = 0.25,
        write_budget_s: float = 5.0,
        store_retry_s: float = 30.0,
        lock_ttl_s: float = 3.0,
        lock_wait_s: float = 10.0,
        stats: CacheStats | None = None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """A cache in front of `encode`, which is only ever asked for distinct descriptions.

        store: None keeps whole lists in memory and nothing else
        width, fingerprint: the length of a row, and the name of all that rows depend on
        memory: to be used instead of one of `memory_bytes`
        secret: with one, entries that weren't written with it are refused
        ttl_jitter: the fraction by which a life may be shorter than `ttl_s`, so that not all end at once
        store_budget_s: what the store may add to one request
        write_budget_s, store_retry_s: the bound of each write in the background, and the pause after one failed
        lock_ttl_s: how long a label stays another replica's to encode after that one was killed
        lock_wait_s: how long one request waits for labels that other replicas encode; 0 never waits, and takes no locks
        stats: counts on in those of a cache before
        clock: any one that doesn't go back; the wall clock is never read
        """
        if not 0 <= ttl_jitter < 0.5:
            raise ValueError(
                f"ttl_jitter is {ttl_jitter}; it must be in [0, 0.5), since a list is refreshed at half its life"
            )
        for name, value in (
            ("ttl_s", ttl_s),
            ("store_budget_s", store_budget_s),
            ("write_budget_s", write_budget_s),
            ("lock_ttl_s", lock_ttl_s),
        ):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not lock_wait_s >= 0:
            raise ValueError(f"lock_wait_s is {lock_wait_s}; give 0 to wait for no other replica, or more")
        self.stats = CacheStats() if stats is None else stats
        self._keys = CacheKeys(namespace, fingerprint)
        self._own = Variant(fingerprint, encode)
        self._ttl_s, self._store_retry_s = ttl_s, store_retry_s
        self._clock = clock
        self._memory: ListMemory = ByteLru(memory_bytes) if memory is None else memory
        self._lists: dict[str, asyncio.Task[_Found]] = {}
        self._labels: Flights[Landed] = Flights()
        self._background = Background(MAX_BACKGROUND)
        self._entries = Entries(width, secret)
        self._access: StoreAccess | None = None
        if store is not None:
            times = StoreTimes(ttl_s, ttl_jitter, store_budget_s, write_budget_s)
            self._access = StoreAccess(store, self.stats, times, uniform=uniform)
        self._fetcher = LabelFetcher(
            self._access,
            self._entries,
            self._background,
            self.stats,
            LockTimes(lock_ttl_s, lock_wait_s),
            uniform=uniform,
        )

    async def get(
        self, descriptions: Sequence[str], tenant: str | None = None, variant: Variant | None = None
    ) -> CachedLabels:
        """The rows of `descriptions`, in that order. At least one; repeats are allowed.

        tenant: whose entries they are; with one, neither memory nor the store shows, by a quick answer, what others
          have asked for, and nothing is shared with them. None shares with all others who give none.
        variant: instead of the cache's own `encode` and fingerprint

        Raises what `encode` raised, and `NumericalError` when it gave NaN or infinity; neither is kept.
        """
        if not descriptions:
            raise ValueError("no descriptions given; a list needs at least one")
        asked = self._ask(descriptions, tenant, variant or self._own)
        distinct = asked.distinct
        held = self._memory.get(asked.key)
        if held is not None:
            self.stats.memory.hits += 1
            self.stats.encodings_saved["memory"] += len(distinct)
            self._keep_in_store(asked, held)
            return CachedLabels(_in_order(held.rows, distinct, descriptions), len(descriptions), "memory")
        self.stats.memory.misses["absent"] += 1
        found = await self._join(asked)
        hits = sum(description not in found.encoded for description in descriptions)
        return CachedLabels(_in_order(found.rows, distinct, descriptions), hits, found.source)

    async def keep(self, descriptions: Sequence[str], tenant: str | None = None) -> CachedLabels:
        """As `get`, but returns once the entries of the list and of its labels are in the store, or were refused there.

        For a list that is known to be asked for again: its list entry doesn't wait until it is.
        """
        cached = await self.get(descriptions, tenant)
        if self._access is None:
            return cached
        if self._background.tasks:  # the labels' entries may be on their way
            await asyncio.wait(self._background.tasks)
        asked = self._ask(descriptions, tenant, self._own)
        held = self._memory.get(asked.key)
        if held is None:  # it is too large for memory, or has left it again
            held = _Held(_in_order(cached.rows, list(descriptions), asked.distinct), _Upkeep())
        held.upkeep.due_at = self._half_life_from_now()
        await self._refresh(self._access, asked, held)
        return cached

    async def drain(self) -> None:
        """Returns once no look-up and no write is under way."""
        while pending := [*self._lists.values(), *self._background.tasks]:
            await asyncio.wait(pending)

    async def close(self) -> None:
        """Finishes what is under way and closes the store. No `get` may follow."""
        await self.drain()
        if self._access is not None:
            await self._access.close()

    def _ask(self, descriptions: Sequence[str], tenant: str | None, variant: Variant) -> _Asked:
        distinct = sorted(set(descriptions))
        keys = self._keys.of_fingerprint(variant.fingerprint).of_tenant(tenant)
        return _Asked(keys, keys.list(distinct), distinct, variant.encode)

    # Looking up

    async def _join(self, asked: _Asked) -> _Found:
        """Joins the look-up of this list that is under way, or starts one, which outlives any of its callers."""
        look_up = self._lists.get(asked.key)
        if look_up is None:
            look_up = detached(self._find(asked))
            self._lists[asked.key] = look_up
            look_up.add_done_callback(lambda done: self._end(asked.key, done))
        else:
            self.stats.shared_flights += 1
            self.stats.encodings_saved["flight"] += len(asked.distinct)
        return await asyncio.shield(look_up)

    def _end(self, key: str, look_up: "asyncio.Task[_Found]") -> None:
        del self._lists[key]
        if not look_up.cancelled():
            look_up.exception()  # its waiters have it; asked for here in case that all of them left

    async def _find(self, asked: _Asked) -> _Found:
        """Looks the list up in the store, fetches the labels that it lacks, and keeps what was new."""
        visit = await self._visit(asked)
        if visit.rows is not None:
            self.stats.encodings_saved["list"] += len(asked.distinct)
            self._hold(asked, visit.rows, _Upkeep(self._half_life_from_now(), listed=True))
            return _Found(visit.rows, frozenset(), "list")
        upkeep = _Upkeep()
        labels = await self._fetch_labels(asked, visit, upkeep)
        rows = LabelRows.join([label.rows for label in labels])
        held = self._hold(asked, rows, upkeep)
        if self._access is not None:
            self._in_background(held, self._keep_found(self._access, asked, held, visit))
        encoded = frozenset(d for d, label in zip(asked.distinct, labels, strict=True) if label.fresh)
        return _Found(rows, encoded, "encoder" if encoded else "labels")

    async def _visit(self, asked: _Asked) -> _Visit:
        """What the store has of the whole list; a store that fails has nothing."""
        visit = _Visit()
        if self._access is None:
            return visit
        deadline = self._access.deadline()
        try:
            [data] = await self._access.read([asked.key], deadline)
        except StoreError as error:
            self.stats.lists.misses[error.reason] += 1
            visit.failure = error.reason
            return visit
        visit.deadline = deadline
        [visit.rows] = await self._entries.decode(
            [asked.key], [data], len(asked.distinct), self.stats.lists, first=True
        )
        visit.damaged = data is not None and visit.rows is None
        return visit

    async def _fetch_labels(self, asked: _Asked, visit: _Visit, upkeep: _Upkeep) -> list[Landed]:
        """Each label of the list, from whoever is fetching it already, else fetched."""
        wanted = Wanted(asked.keys, asked.distinct)
        request = Request(wanted, visit.deadline, lambda error: self._postpone(upkeep, error), asked.encode)
        fetched = 0

        async def fetch(batch: Batch[Landed]) -> None:
            nonlocal fetched
            fetched += len(batch.missing)
            if visit.failure is not None:
                self.stats.labels.misses[visit.failure] += len(batch.missing)
            await self._fetcher.fetch(batch, request)

        landed = await self._labels.get_many(wanted.keys, fetch)
        self.stats.encodings_saved["flight"] += len(landed) - fetched
        return [landed[key] for key in wanted.keys]

    def _hold(self, asked: _Asked, rows: LabelRows, upkeep: _Upkeep) -> _Held:
        held = _Held(rows, upkeep)
        self._memory.put(asked.key, held, rows.nbytes)
        self.stats.memory.held_bytes = self._memory.held_bytes
        self.stats.memory.evictions = self._memory.evictions
        return held

    # Writing to the store, always in the background

    async def _keep_found(self, access: StoreAccess, asked: _Asked, held: _Held, visit: _Visit) -> None:
        """Leaves the mark of a list that is new; a list that has its mark already is written."""
        upkeep = held.upkeep
        try:
            # A list entry that was refused was written once, so its list is due as much as one that has its mark.
            new = not visit.damaged and await access.write_if_absent(asked.keys.seen(asked.distinct), _MARK)
            if not new:
                await self._write_list(access, asked, held)
        except StoreError as error:
            self._postpone(upkeep, error)
            return
        if upkeep.due_at == _NEVER:
            upkeep.due_at = self._clock() if new else self._half_life_from_now()

    def _keep_in_store(self, asked: _Asked, held: _Held) -> None:
        """Starts the upkeep of a list in memory when it is due: on its second sighting, then every half life."""
        if self._access is None or self._clock() < held.upkeep.due_at:
            return
        held.upkeep.due_at = self._half_life_from_now()
        self._in_background(held, self._refresh(self._access, asked, held))

    async def _refresh(self, access: StoreAccess, asked: _Asked, held: _Held) -> None:
        """Extends the lives of a list's entries and writes those that the store doesn't have."""
        self.stats.refreshes += 1
        label_keys = [asked.keys.label(description) for description in asked.distinct]
        try:
            list_there, *labels_there = await access.touch([asked.key, *label_keys])
            lost = [i for i, there in enumerate(labels_there) if not there]
            if lost:
                self.stats.labels.evictions += 0 if held.upkeep.incomplete else len(lost)
                await self._write_labels(access, [label_keys[i] for i in lost], held.rows.take(lost))
            if not list_there:
                self.stats.lists.evictions += held.upkeep.listed
                await self._write_list(access, asked, held)
            held.upkeep.incomplete = False
        except StoreError as error:
            self._postpone(held.upkeep, error)

    async def _write_list(self, access: StoreAccess, asked: _Asked, held: _Held) -> None:
        entry = await self._entries.encode(asked.key, held.rows)
        await access.write({asked.key: entry})
        held.upkeep.listed = True
        self.stats.lists.written_bytes += len(entry)

    async def _write_labels(self, access: StoreAccess, keys: Sequence[str], rows: LabelRows) -> None:
        """Writes label entries again that the store has lost."""
        _, entries = await self._entries.through_codec(keys, rows)
        await access.write(entries)
        self.stats.labels.written_bytes += sum(map(len, entries.values()))

    def _in_background(self, held: _Held, work: Coroutine[Any, Any, None]) -> None:
        if not self._background.start(work):
            self.stats.skipped_writes += 1
            self._postpone(held.upkeep, None)

    # When it is next the store's turn

    def _postpone(self, upkeep: _Upkeep, error: StoreError | None) -> None:
        """Has a failed write tried again after a pause; one that is too large would only fail again."""
        too_large = error is not None and error.reason == "too_large"
        upkeep.incomplete = True
        upkeep.due_at = self._clock() + (self._ttl_s / 2 if too_large else self._store_retry_s)

    def _half_life_from_now(self) -> float:
        return self._clock() + self._ttl_s / 2


def _in_order(rows: LabelRows, given: list[str], descriptions: Sequence[str]) -> LabelRows:
    """The rows of `descriptions`, out of those of `given`."""
    position = {description: i for i, description in enumerate(given)}
    return rows.take([position[description] for description in descriptions])
