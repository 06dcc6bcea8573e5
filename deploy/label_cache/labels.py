"""Rows of single labels: from the store, from another replica that is encoding them, else from the encoder."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from deploy.label_cache.access import StoreAccess
from deploy.label_cache.background import Background
from deploy.label_cache.codec import LabelRows
from deploy.label_cache.entries import Entries
from deploy.label_cache.flights import Batch
from deploy.label_cache.keys import CacheKeys
from deploy.label_cache.locks import LockTimes, Turn
from deploy.label_cache.stats import CacheStats
from deploy.label_cache.store import StoreError
from tokenalign.errors import TokenAlignError

Encode = Callable[[list[str]], Awaitable[LabelRows]]
"""Gives the rows of descriptions, in their order."""


class LabelEncodingError(TokenAlignError):
    """The encoder gave no rows, or rows that don't answer what it was asked."""


@dataclass(frozen=True, slots=True)
class Landed:
    """The rows of one label as its entry gives them; `fresh` when they were encoded for it."""

    rows: LabelRows
    fresh: bool


class Wanted:
    """Labels by the key of their entry."""

    def __init__(self, keys: CacheKeys, descriptions: Sequence[str]) -> None:
        self._keys = keys
        self._descriptions = {keys.label(description): description for description in descriptions}

    @property
    def keys(self) -> list[str]:
        """The keys, in the order of the descriptions."""
        return list(self._descriptions)

    def descriptions(self, keys: Sequence[str]) -> list[str]:
        """What the labels are, in the order of `keys`."""
        return [self._descriptions[key] for key in keys]

    def locks(self, keys: Sequence[str]) -> list[str]:
        """The keys of their locks, in the order of `keys`."""
        return [self._keys.lock(self._descriptions[key]) for key in keys]


@dataclass(frozen=True, slots=True)
class Request:
    """What one request wants fetched.

    deadline: the event loop's time until which the store may keep it; None when the store isn't to be asked
    unwritten: told why new entries could not be written, None when there was no room to try
    encode: gives the rows of what is missing
    """

    wanted: Wanted
    deadline: float | None
    unwritten: Callable[[StoreError | None], None]
    encode: Encode


class LabelFetcher:
    """Lands batches of labels. Entries are written in the background, before the locks of their labels are freed."""

    def __init__(
        self,
        access: StoreAccess | None,
        entries: Entries,
        background: Background,
        stats: CacheStats,
        locks: LockTimes,
        *,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._access = access
        self._entries = entries
        self._background = background
        self._stats = stats
        self._locks = locks
        self._uniform = uniform

    async def fetch(self, batch: Batch[Landed], request: Request) -> None:
        """Lands every label of the batch; raises what the encoder raised, and nothing of the store's."""
        if self._access is None:
            await self._encode_missing(batch, request, batch.missing)
            return
        turn = Turn(self._access, self._locks, uniform=self._uniform)
        try:
            if request.deadline is not None:
                with contextlib.suppress(StoreError):  # counted where it happened; the encoder has what the store lacks
                    await self._fetch_shared(self._access, batch, request, turn, request.deadline)
            if batch.missing:
                await self._encode_missing(batch, request, batch.missing, turn)
        finally:
            if left := turn.hand_over():
                self._background.start(turn.free(left))

    async def _fetch_shared(
        self, access: StoreAccess, batch: Batch[Landed], request: Request, turn: Turn, deadline: float
    ) -> None:
        """Lands what the store has or other replicas bring in time, and encodes what is ours to encode."""
        await self._read(access, batch, deadline)
        if self._locks.wait_s == 0:
            return
        free, waiting = batch.missing, False
        while batch.missing:
            mine = await self._take(access, batch, request, turn, free, deadline)
            if mine:
                self._stats.lock_takeovers += len(mine) if waiting else 0
                await self._encode_missing(batch, request, mine, turn)
            if not batch.missing:
                return
            if not waiting:
                waiting = True
                self._stats.lock_waits += len(batch.missing)
            deadline = access.deadline()
            looked = await self._wait(batch, request, turn)
            if looked is None:
                self._stats.lock_timeouts += len(batch.missing)
                return
            free = looked

    async def _read(self, access: StoreAccess, batch: Batch[Landed], deadline: float) -> None:
        """Lands the labels whose entries are in the store."""
        keys = batch.missing
        try:
            entries = await access.read(keys, deadline)
        except StoreError as error:
            self._stats.labels.misses[error.reason] += len(keys)
            raise
        rows = await self._entries.decode(keys, entries, 1, self._stats.labels, first=True)
        self._stats.encodings_saved["labels"] += self._land(batch, keys, rows)

    async def _take(
        self,
        access: StoreAccess,
        batch: Batch[Landed],
        request: Request,
        turn: Turn,
        free: Sequence[str],
        deadline: float,
    ) -> list[str]:
        """Those of the labels whose locks seemed free that are ours to encode.

        They are read once more under the lock: between our look and our lock another replica may have written them.
        """
        locks = request.wanted.locks(free)
        taken = await turn.take(locks, deadline)
        mine = [key for key, lock in zip(free, locks, strict=True) if lock in taken]
        if mine:
            await self._land_from_others(batch, mine, await access.read(mine, deadline))
        return [key for key in batch.missing if key in set(mine)]

    async def _wait(self, batch: Batch[Landed], request: Request, turn: Turn) -> list[str] | None:
        """After a pause, lands what other replicas have written, and gives the labels whose locks are free.

        None when the time for waiting is over.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            if not await turn.pause():
                return None
            keys = batch.missing
            locks = request.wanted.locks(keys)
            entries, free = await turn.look(keys, locks)
        finally:
            self._stats.lock_wait_s += loop.time() - started
        await self._land_from_others(batch, keys, entries)
        return [key for key, lock in zip(keys, locks, strict=True) if lock in free and key in set(batch.missing)]

    async def _land_from_others(
        self, batch: Batch[Landed], keys: Sequence[str], entries: Sequence[bytes | None]
    ) -> None:
        rows = await self._entries.decode(keys, entries, 1, self._stats.labels, first=False)
        self._stats.encodings_saved["replica"] += self._land(batch, keys, rows)

    def _land(self, batch: Batch[Landed], keys: Sequence[str], rows: Sequence[LabelRows | None]) -> int:
        """How many labels had rows; these have landed, and are in the store for whoever asks later."""
        found = [(key, label) for key, label in zip(keys, rows, strict=True) if label is not None]
        for key, label in found:
            batch.land(key, Landed(label, fresh=False))
        batch.close(key for key, _ in found)
        return len(found)

    async def _encode_missing(
        self, batch: Batch[Landed], request: Request, keys: list[str], turn: Turn | None = None
    ) -> None:
        """Encodes and lands labels, and has their entries written and then their locks freed in the background."""
        async with turn.keeping() if turn is not None else contextlib.nullcontext():
            rows = await self._encoded(request.wanted.descriptions(keys), request.encode)
        labels, entries = await self._entries.through_codec(keys, rows)
        for key, label in zip(keys, labels, strict=True):
            batch.land(key, Landed(label, fresh=True))
        if self._access is None or turn is None:
            batch.close(keys)
            return
        locks = turn.hand_over(request.wanted.locks(keys))
        if not self._background.start(self._keep(self._access, batch, request, entries, turn, locks)):
            self._stats.skipped_writes += 1  # and the locks end by themselves
            batch.close(keys)
            request.unwritten(None)

    async def _encoded(self, descriptions: list[str], encode: Encode) -> LabelRows:
        self._stats.encode_calls += 1
        self._stats.encoded_descriptions += len(descriptions)
        try:
            rows = await encode(descriptions)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not we were cancelled but what `encode` waited for; passed on, it would look like the callers' own.
            raise LabelEncodingError(f"the encoding of {len(descriptions)} label descriptions was cancelled") from error
        if (len(rows), rows.width) != (len(descriptions), self._entries.width):
            raise LabelEncodingError(
                f"the encoder gave {len(rows)} descriptions of width {rows.width}, "
                f"not {len(descriptions)} of {self._entries.width}; it is another model, or defective"
            )
        return rows

    async def _keep(
        self,
        access: StoreAccess,
        batch: Batch[Landed],
        request: Request,
        entries: dict[str, bytes],
        turn: Turn,
        locks: Sequence[str],
    ) -> None:
        """Writes new entries, then frees the locks: who finds one free finds the entry, or knows that it failed."""
        try:
            await access.write(entries)
            self._stats.labels.written_bytes += sum(map(len, entries.values()))
        except StoreError as error:
            request.unwritten(error)
        finally:
            batch.close(entries)
            await turn.free(locks)
