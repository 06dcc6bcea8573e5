"""A store at an address that may change: the embedded server's, after it was started anew elsewhere."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from deploy.label_cache.store import Store, StoreError

ResultT = TypeVar("ResultT")

ASK_AGAIN_S = 1.0


class FollowingStore:
    """Asks where the store is at its first use, and again after it could not be reached.

    resolve: gives the URL; any error of it counts as a store that can't be reached. At most one question a second goes
    out, so that a dead server costs requests next to nothing.
    """

    def __init__(
        self,
        resolve: Callable[[], Awaitable[str]],
        open_store: Callable[[str], Store],
        *,
        ask_again_s: float = ASK_AGAIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolve = resolve
        self._open = open_store
        self._ask_again_s = ask_again_s
        self._clock = clock
        self._store: Store | None = None
        self._failed_at = float("-inf")
        self._asking = asyncio.Lock()

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`."""
        return await self._try(lambda store: store.get_many(keys))

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        """See `Store.set_many`."""
        await self._try(lambda store: store.set_many(values, ttl_s))

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        """See `Store.touch_many`."""
        return await self._try(lambda store: store.touch_many(keys, ttl_s))

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        """See `Store.set_if_absent_many`."""
        return await self._try(lambda store: store.set_if_absent_many(values, ttl_s))

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        """See `Store.delete_if_equal_many`."""
        return await self._try(lambda store: store.delete_if_equal_many(values))

    async def set_forever(self, key: str, value: bytes) -> None:
        """See `Store.set_forever`."""
        await self._try(lambda store: store.set_forever(key, value))

    async def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        return await self._try(lambda store: store.delete(key))

    async def ping(self) -> None:
        """See `Store.ping`."""
        await self._try(lambda store: store.ping())

    async def close(self) -> None:
        """See `Store.close`."""
        if self._store is not None:
            await self._store.close()

    async def _try(self, call: Callable[[Store], Awaitable[ResultT]]) -> ResultT:
        store = await self._current()
        try:
            return await call(store)
        except StoreError as error:
            if error.reason == "connect" and self._store is store:
                self._failed_at = self._clock()
                self._store = None
                with contextlib.suppress(StoreError):
                    await store.close()
            raise

    async def _current(self) -> Store:
        async with self._asking:
            self._store = self._store or await self._open_anew()
            return self._store

    async def _open_anew(self) -> Store:
        if self._clock() - self._failed_at < self._ask_again_s:
            raise StoreError("connect", "the embedded store could not be reached a moment ago; not asked again yet")
        try:
            return self._open(await self._resolve())
        except BaseException as error:
            self._failed_at = self._clock()
            if not isinstance(error, Exception):  # a caller who waited as long as it could; the next need not
                raise
            raise StoreError("connect", f"the embedded store has no address: {error}") from error
