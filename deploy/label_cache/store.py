"""Where the bytes of cache entries are kept: the seam, a store in memory, and Redis.

A store moves bytes under string keys and knows nothing of what they mean.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast, get_args
from urllib.parse import parse_qs, urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

from deploy.label_cache.lru import ENTRY_OVERHEAD_BYTES, ByteLru
from tokenalign.errors import TokenAlignError

DEFAULT_MAX_VALUE_BYTES = 64 * 2**20
"""About 20,000 label descriptions; Redis itself takes 512 MiB."""

DEFAULT_MAX_FOREVER_BYTES = 16 * 2**20
"""About 1,000 definitions of 77 described labels each."""

# Sent whole each time: EVALSHA would fail once after each restart or fail-over, and the text is 200 bytes.
# `pcall`, since GET of a key that holds another type is an error, and such a key isn't equal.
_DELETE_IF_EQUAL = """
local deleted = {}
for i, key in ipairs(KEYS) do
  deleted[i] = redis.pcall('GET', key) == ARGV[i] and redis.call('DEL', key) or 0
end
return deleted
"""

StoreReason = Literal[
    "timeout", "connect", "busy", "auth", "loading", "readonly", "oom", "cluster", "too_large", "server", "unexpected"
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
        """The value of each key, in the order of `keys`, None where there is none."""

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
        self._entries: ByteLru[tuple[bytes, float]] = ByteLru(max_bytes)
        self._forever: dict[str, bytes] = {}
        self._max_forever_bytes = max_forever_bytes
        self._clock = clock

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`."""
        return [self._live(key) for key in keys]

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        """See `Store.set_many`; a value above `max_bytes` is refused."""
        expires_at = self._clock() + _positive(ttl_s)
        refused = [key for key, value in values.items() if not self._put(key, value, expires_at)]
        _refuse(refused, values, self._entries.max_bytes)

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        """See `Store.touch_many`."""
        expires_at = self._clock() + _positive(ttl_s)
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


class RedisStore:
    """A store on one Redis or Valkey server, over TCP, TLS or a unix socket. Build one with `from_url`."""

    def __init__(self, client: Redis, *, max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES) -> None:
        self._client = client
        self._max_value_bytes = max_value_bytes

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        connect_timeout_s: float = 0.25,
        read_timeout_s: float = 0.5,
        retries: int = 1,
        max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES,
    ) -> "RedisStore":
        """A store that connects at its first use, to `redis://`, `rediss://` (TLS) or `unix://`.

        User and password come from the URL or from the arguments, not both. A command whose connection broke is sent
        again up to `retries` times. Options of redis-py may follow in the URL, such as `?ssl_ca_certs=/path`.
        Raises `ValueError` when the URL can't be used; the message doesn't repeat it, since it may hold a password.
        """
        parts = urlsplit(url)
        in_url = parts.username is not None or parts.password is not None or "password" in parse_qs(parts.query)
        if in_url and (username is not None or password is not None):
            raise ValueError("user and password are given both in the store's URL and beside it; leave out one of them")
        given: dict[str, Any] = {"username": username, "password": password}
        try:
            client = Redis.from_url(
                url,
                protocol=2,  # one round trip less at connect than RESP3's HELLO, and nothing of RESP3 is used
                socket_connect_timeout=connect_timeout_s,
                socket_timeout=read_timeout_s,
                retry=Retry(ExponentialWithJitterBackoff(cap=0.1, base=0.01), retries),
                **{name: value for name, value in given.items() if value is not None},
            )
            # Unknown options show only when a connection object is made, which would be the first request.
            client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py leaves it bare
        except (TypeError, ValueError, exceptions.RedisError) as error:
            raise ValueError(
                f"the store's URL of scheme {parts.scheme!r} can't be used: {error}; "
                "give redis://host:port, rediss://host:port or unix:///path"
            ) from error
        if client.get_encoder().decode_responses:  # type: ignore[no-untyped-call]  # redis-py leaves it bare
            raise ValueError("the store's URL sets decode_responses, but entries are bytes; remove it")
        return cls(client, max_value_bytes=max_value_bytes)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`; one MGET. A key that holds something else than a string counts as missing."""
        if not keys:
            return []
        with _as_store_errors(f"reading {len(keys)} keys"):
            return cast("list[bytes | None]", await self._client.mget(list(keys)))

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        """See `Store.set_many`; one pipeline, not a transaction. A value above `max_value_bytes` is refused."""
        ttl_ms = _milliseconds(ttl_s)
        refused = [key for key, value in values.items() if len(value) > self._max_value_bytes]
        with _as_store_errors(f"writing {len(values)} keys"):
            async with self._client.pipeline(transaction=False) as pipeline:
                for key in values.keys() - set(refused):
                    pipeline.set(key, values[key], px=ttl_ms)
                await _execute(pipeline)
        _refuse(refused, values, self._max_value_bytes)

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        """See `Store.touch_many`; one pipeline of PEXPIRE."""
        ttl_ms = _milliseconds(ttl_s)
        with _as_store_errors(f"extending {len(keys)} keys"):
            async with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.pexpire(key, ttl_ms)
                return [bool(found) for found in await _execute(pipeline)]

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        """See `Store.set_if_absent_many`; one pipeline of SET NX PX."""
        ttl_ms = _milliseconds(ttl_s)
        with _as_store_errors(f"claiming {len(values)} keys"):
            async with self._client.pipeline(transaction=False) as pipeline:
                for key, value in values.items():
                    pipeline.set(key, value, px=ttl_ms, nx=True)
                return [bool(written) for written in await _execute(pipeline)]

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        """See `Store.delete_if_equal_many`; one EVAL, all keys at once."""
        if not values:
            return []
        with _as_store_errors(f"releasing {len(values)} keys"):
            answers = await self._client.eval(_DELETE_IF_EQUAL, len(values), *values.keys(), *values.values())
            return [bool(deleted) for deleted in answers]

    async def set_forever(self, key: str, value: bytes) -> None:
        """See `Store.set_forever`; a SET without TTL. A server whose policy is `allkeys-…` may still evict it."""
        if len(value) > self._max_value_bytes:
            _refuse([key], {key: value}, self._max_value_bytes)
        with _as_store_errors(f"writing {key}"):
            await self._client.set(key, value)

    async def delete(self, key: str) -> bool:
        """See `Store.delete`; DEL."""
        with _as_store_errors(f"deleting {key}"):
            return bool(await self._client.delete(key))

    async def ping(self) -> None:
        """See `Store.ping`."""
        with _as_store_errors("a ping"):
            await self._client.ping()

    async def close(self) -> None:
        """See `Store.close`."""
        with _as_store_errors("closing"):
            await self._client.aclose()


_REASONS: tuple[tuple[type[BaseException], StoreReason], ...] = (
    (exceptions.TimeoutError, "timeout"),
    (exceptions.MaxConnectionsError, "busy"),
    (exceptions.BusyLoadingError, "loading"),
    (exceptions.AuthenticationError, "auth"),
    (exceptions.AuthorizationError, "auth"),
    (exceptions.NoPermissionError, "auth"),
    (exceptions.ReadOnlyError, "readonly"),
    (exceptions.OutOfMemoryError, "oom"),
    (exceptions.AskError, "cluster"),  # MOVED is one of them
    (exceptions.ClusterError, "cluster"),
    (exceptions.ConnectionError, "connect"),
    (exceptions.RedisError, "server"),
    (TimeoutError, "timeout"),
    (OSError, "connect"),
    (EOFError, "connect"),
)
"""From the special to the general: the first that fits is taken."""


@contextmanager
def _as_store_errors(what: str) -> Iterator[None]:
    """The one place where an error of redis-py becomes a `StoreError`."""
    try:
        yield
    except StoreError:
        raise
    # redis-py was seen to raise AttributeError and RuntimeError when a connection goes away in the middle of a command;
    # none of that may reach a caller who brings all that is needed to do without the store.
    except Exception as error:
        root = _root(error)
        reason: StoreReason = next((r for kind, r in _REASONS if isinstance(root, kind)), "unexpected")
        raise StoreError(reason, f"{what} failed: {type(error).__name__}: {error}") from error


def _root(error: Exception) -> Exception:
    """What went wrong, where redis-py wraps it: a failed handshake on a unix socket arrives as a ConnectionError."""
    cause = error.__cause__
    return cause if type(error) is exceptions.ConnectionError and isinstance(cause, exceptions.RedisError) else error


async def _execute(pipeline: Pipeline) -> list[object]:
    """The answers of all commands; raises the first error only after every command had its turn."""
    answers: list[object] = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _refuse(keys: Sequence[str], values: Mapping[str, bytes], max_bytes: int) -> None:
    if keys:
        raise StoreError(
            "too_large",
            f"{len(keys)} of {len(values)} values were not stored: {keys[0]} has {len(values[keys[0]])} bytes, "
            f"at most {max_bytes} are allowed",
        )


def _forever_bytes(value: bytes) -> int:
    return len(value) + ENTRY_OVERHEAD_BYTES


def _positive(ttl_s: float) -> float:
    if not ttl_s > 0:
        raise ValueError(f"ttl_s is {ttl_s}; an entry must live for more than 0 seconds")
    return ttl_s


def _milliseconds(ttl_s: float) -> int:
    return max(1, round(1_000 * _positive(ttl_s)))
