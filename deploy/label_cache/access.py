"""The store as the cache asks it: within bounds of time, with its errors counted."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from deploy.label_cache.stats import CacheStats
from deploy.label_cache.store import Store, StoreError

Answer = TypeVar("Answer")

_Kind = Literal["read", "write"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreTimes:
    """ttl_s, ttl_jitter: the life of an entry, and the fraction by which it may be shorter
    budget_s: of what the store may add to one request before anything is encoded
    write_budget_s: of each write in the background
    """

    ttl_s: float
    ttl_jitter: float
    budget_s: float
    write_budget_s: float


class StoreAccess:
    """A store whose every answer is there in time, or is a `StoreError` that was counted."""

    def __init__(
        self, store: Store, stats: CacheStats, times: StoreTimes, *, uniform: Callable[[], float] = random.random
    ) -> None:
        self._store = store
        self._stats = stats
        self._times = times
        self._uniform = uniform
        self._failing: dict[_Kind, str] = {}

    def deadline(self) -> float:
        """The event loop's time at which a request that starts now goes on without the store."""
        return asyncio.get_running_loop().time() + self._times.budget_s

    async def read(self, keys: Sequence[str], deadline: float) -> list[bytes | None]:
        """The value of each key."""
        return await self._ask("read", self._store.get_many(keys), deadline)

    async def write(self, values: Mapping[str, bytes]) -> None:
        """Writes entries for a life of their own."""
        await self._ask("write", self._store.set_many(values, self._life_s()), self._write_deadline())

    async def touch(self, keys: Sequence[str]) -> list[bool]:
        """Whether each entry is there; those that are live anew."""
        return await self._ask("write", self._store.touch_many(keys, self._life_s()), self._write_deadline())

    async def write_if_absent(self, key: str, value: bytes) -> bool:
        """Whether the entry was absent; now it is there."""
        [absent] = await self._ask(
            "write", self._store.set_if_absent_many({key: value}, self._life_s()), self._write_deadline()
        )
        return absent

    async def lock(self, values: Mapping[str, bytes], ttl_s: float, deadline: float) -> list[bool]:
        """For each key whether it was free and now holds its value for `ttl_s`."""
        return await self._ask("write", self._store.set_if_absent_many(values, ttl_s), deadline)

    async def extend(self, keys: Sequence[str], ttl_s: float) -> None:
        """Has locks that are there live for `ttl_s` from now."""
        await self._ask("write", self._store.touch_many(keys, ttl_s), self._write_deadline())

    async def unlock(self, values: Mapping[str, bytes]) -> None:
        """Frees the keys that hold their value."""
        await self._ask("write", self._store.delete_if_equal_many(values), self._write_deadline())

    async def close(self) -> None:
        """Closes the store; an error is counted, not raised."""
        try:
            await self._store.close()
        except StoreError as error:
            self._count(error, "write")

    async def _ask(self, kind: _Kind, answer: Awaitable[Answer], deadline: float) -> Answer:
        try:
            async with asyncio.timeout_at(deadline):
                answered = await answer
        except TimeoutError as error:
            late = StoreError("timeout", "the store did not answer within the time that it is given")
            self._count(late, kind)
            raise late from error
        except StoreError as error:
            self._count(error, kind)
            raise
        self._stats.store_round_trips += 1
        self._failing.pop(kind, None)
        return answered

    def _count(self, error: StoreError, kind: _Kind) -> None:
        """Counts each error, but logs only the first of a kind in a row: a store that is gone fails every request.

        Reads and writes have their rows apart, since a full store fails all writes between reads that succeed.
        """
        self._stats.store_errors[error.reason] += 1
        self._stats.store_round_trips += error.reason != "open"  # then it was not even asked
        if error.reason not in self._failing.values():
            logger.warning("the label store fails (%s), going on without it: %s", error.reason, error)
        self._failing[kind] = error.reason

    def _write_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._times.write_budget_s

    def _life_s(self) -> float:
        return self._times.ttl_s * (1 - self._times.ttl_jitter * self._uniform())
