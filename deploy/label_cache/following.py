"""A store at an address that may change: the embedded server's, after it was started anew elsewhere."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from deploy.label_cache.store import Store, StoreError
from deploy.label_cache.wrapper import StoreWrapper

ResultT = TypeVar("ResultT")

ASK_AGAIN_S = 1.0


class FollowingStore(StoreWrapper):
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

    async def close(self) -> None:
        """See `Store.close`."""
        if self._store is not None:
            await self._store.close()

    async def _through(self, call: Callable[[Store], Awaitable[ResultT]]) -> ResultT:
        store = await self._current()
        try:
            return await call(store)
        except StoreError as error:
            if error.reason == "connect" and self._store is store:
                self._failed_at = self._clock()
                self._store = None
                with suppress(StoreError):
                    await store.close()
            raise

    async def _current(self) -> Store:
        async with self._asking:
            self._store = self._store or await self._open_anew()
            return self._store

    async def _open_anew(self) -> Store:
        if self._clock() - self._failed_at < self._ask_again_s:
            raise StoreError("connect", "the embedded store could not be reached a moment ago; not asked again yet")
        # As long as there is no answer, the question counts as failed: whoever comes after a caller who gave up on it
        # must not wait as long for the next.
        self._failed_at = self._clock()
        try:
            store = self._open(await self._resolve())
        except Exception as error:  # whatever another process may send: callers can do without the store
            self._failed_at = self._clock()
            raise StoreError("connect", f"the embedded store has no address: {error}") from error
        self._failed_at = float("-inf")
        return store
