"""Where the bytes of cache entries are kept: the seam, and a store in memory.

A store moves bytes under string keys and knows nothing of what they mean.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, get_args

from deploy.label_cache.lru import ENTRY_OVERHEAD_BYTES, ByteLru
from tokenalign.errors import TokenAlignError

DEFAULT_MAX_FOREVER_BYTES = 16 * 2**20
"""About 1,000 definitions of 77 described labels each."""

StoreReason = Literal[
    "timeout",
    "connect",
    "open",  # not asked, since it failed again and again a moment ago
    "busy",  # all of our own connections are in use
    "auth",  # nobody gets in: no or a wrong password
    "permission",  # this user may not do this
    "loading",
    "readonly",
    "oom",
    "cluster",
    "too_large",
    "server",  # any other refusal by the server
    "unexpected",
]
STORE_REASONS: tuple[str, ...] = get_args(StoreReason)


class StoreError(TokenAlignError):
    """The store did not do what was asked; `reason` is one word for a counter, the message holds no password."""

    def __init__(self, reason: StoreReason, message: str) -> None:
        super().__init__(reason, message)
        self.reason: StoreReason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


class Store(Protocol):
    """What the cache needs of a store; every method raises `StoreError` and no other error when the store fails."""

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key, in the order of `keys`, None where there is none; an empty value counts as none."""

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        """Returns once all are written and expire in `ttl_s`.

        The writes are independent: when one is refused, the others are done, and the first refusal is raised.
        """

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        """For each key whether it exists; those that do expire in `ttl_s` from now."""

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        """For each key, in the order of `values`, whether it was absent: then it is written and expires in `ttl_s`.

        Where an answer was lost and the command sent again, a key that the first one wrote counts as not absent.
        """

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        """For each key, in the order of `values`, whether it held exactly that value: then it is gone."""

    async def set_forever(self, key: str, value: bytes) -> None:
        """Returns once the value is written; it never expires, and making room for others does not cost it."""

    async def delete(self, key: str) -> bool:
        """Whether the key existed; it is gone."""

    async def ping(self) -> None:
        """Returns when the store answers."""

    async def close(self) -> None:
        """Returns once connections are closed; may be called again."""


class MemoryStore:
    """A store within this process, bounded in bytes: what was used least recently goes first.

    As the cache's only store it keeps single labels, so that a list with one new label costs one encoding even where
    there is no Redis. Values without a life have `max_forever_bytes` of their own, and are refused past it.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        max_forever_bytes: int = DEFAULT_MAX_FOREVER_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._entries: ByteLru[str, tuple[bytes, float]] = ByteLru(max_bytes)
        self._forever: dict[str, bytes] = {}
        self._max_forever_bytes = max_forever_bytes
        self._clock = clock

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`."""
        return [self._live(key) or None for key in keys]

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        """See `Store.set_many`; a value above `max_bytes` is refused."""
        expires_at = self._clock() + positive(ttl_s)
        refused = [key for key, value in values.items() if not self._put(key, value, expires_at)]
        refuse_too_large(refused, values, self._entries.max_bytes)

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        """See `Store.touch_many`."""
        expires_at = self._clock() + positive(ttl_s)
        found = [self._live(key) for key in keys]
        for key, value in zip(keys, found, strict=True):
            if value is not None:
                self._put(key, value, expires_at)
        return [value is not None for value in found]

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        """See `Store.set_if_absent_many`."""
        absent = [key for key in values if self._live(key) is None]
        await self.set_many({key: values[key] for key in absent}, ttl_s)
        written = set(absent)
        return [key in written for key in values]

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        """See `Store.delete_if_equal_many`."""
        return [self._live(key) == value and self._pop(key) for key, value in values.items()]

    async def set_forever(self, key: str, value: bytes) -> None:
        """See `Store.set_forever`; `StoreError` with reason "oom" when the room for such values is full."""
        held_bytes = sum(_forever_bytes(kept) for name, kept in self._forever.items() if name != key)
        if held_bytes + _forever_bytes(value) > self._max_forever_bytes:
            raise StoreError(
                "oom",
                f"{key} was not stored: {len(value)} bytes beside the {held_bytes} of values that never "
                f"expire are more than {self._max_forever_bytes}; delete some of them",
            )
        self._pop(key)
        self._forever[key] = value

    async def delete(self, key: str) -> bool:
        """See `Store.delete`."""
        return self._live(key) is not None and self._pop(key)

    async def ping(self) -> None:
        """See `Store.ping`."""

    async def close(self) -> None:
        """See `Store.close`."""

    def _put(self, key: str, value: bytes, expires_at: float) -> bool:
        self._forever.pop(key, None)
        return self._entries.put(key, (value, expires_at), len(value))

    def _pop(self, key: str) -> bool:
        self._entries.pop(key)
        self._forever.pop(key, None)
        return True

    def _live(self, key: str) -> bytes | None:
        if key in self._forever:
            return self._forever[key]
        entry = self._entries.get(key)
        if entry is None:
            return None
        value, expires_at = entry
        if expires_at <= self._clock():
            self._entries.pop(key)
            return None
        return value


def refuse_too_large(keys: Sequence[str], values: Mapping[str, bytes], max_bytes: int) -> None:
    """Raises `StoreError` that names the first of `keys`, where there is one."""
    if keys:
        raise StoreError(
            "too_large",
            f"{len(keys)} of {len(values)} values were not stored: {keys[0]} has {len(values[keys[0]])} bytes, "
            f"at most {max_bytes} are allowed",
        )


def positive(ttl_s: float) -> float:
    """`ttl_s`, or `ValueError`."""
    if not ttl_s > 0:
        raise ValueError(f"ttl_s is {ttl_s}; an entry must live for more than 0 seconds")
    return ttl_s


def _forever_bytes(value: bytes) -> int:
    return len(value) + ENTRY_OVERHEAD_BYTES
