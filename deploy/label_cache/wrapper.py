"""A store in front of another one."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from deploy.label_cache.store import Store

ResultT = TypeVar("ResultT")


class StoreWrapper(ABC):
    """Passes every call to a store that the subclass chooses, through its `_through`; `close` is the subclass's own."""

    @abstractmethod
    async def _through(self, call: Callable[[Store], Awaitable[ResultT]]) -> ResultT:
        """The answer of `call`, made on the store behind."""

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`."""
        return await self._through(lambda store: store.get_many(keys))

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        """See `Store.set_many`."""
        await self._through(lambda store: store.set_many(values, ttl_s))

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        """See `Store.touch_many`."""
        return await self._through(lambda store: store.touch_many(keys, ttl_s))

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        """See `Store.set_if_absent_many`."""
        return await self._through(lambda store: store.set_if_absent_many(values, ttl_s))

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        """See `Store.delete_if_equal_many`."""
        return await self._through(lambda store: store.delete_if_equal_many(values))

    async def set_forever(self, key: str, value: bytes) -> None:
        """See `Store.set_forever`."""
        await self._through(lambda store: store.set_forever(key, value))

    async def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        return await self._through(lambda store: store.delete(key))

    async def ping(self) -> None:
        """See `Store.ping`."""
        await self._through(lambda store: store.ping())
