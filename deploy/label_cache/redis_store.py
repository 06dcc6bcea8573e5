"""A store on Redis or Valkey, and what its errors are called."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import Sentinel

from deploy.label_cache.redis_clients import ConnectionOptions, open_client
from deploy.label_cache.store import StoreError, StoreReason, positive, refuse_too_large

DEFAULT_MAX_VALUE_BYTES = 64 * 2**20
"""About 20,000 label descriptions; Redis itself takes 512 MiB."""

# Sent whole each time: EVALSHA would fail once after each restart or fail-over, and the text is short. `pcall`, since
# GET of a key that holds another type is an error, and such a key isn't equal.
_DELETE_IF_EQUAL = """
local deleted = {}
for i, key in ipairs(KEYS) do
  local held = redis.pcall('GET', key)
  if type(held) == 'table' and held.err and not string.find(held.err, 'WRONGTYPE') then return held end
  deleted[i] = held == ARGV[i] and redis.call('DEL', key) or 0
end
return deleted
"""

_WRONG_TYPE = ("WRONGTYPE",)
_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError)


class RedisStore:
    """A store on Redis or Valkey: one server, the master of a Sentinel group, or a cluster. Build one with `from_url`.

    Each call is one round trip, in a cluster one to each of its masters.
    """

    def __init__(
        self,
        client: Redis | RedisCluster,
        *,
        sentinel: Sentinel | None = None,
        max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES,
    ) -> None:
        """A store that uses `client`, and closes it and `sentinel`; no value above `max_value_bytes` is moved."""
        self._client = client
        self._sentinel = sentinel
        self._max_value_bytes = max_value_bytes

    @classmethod
    def from_url(
        cls,
        url: str,
        options: ConnectionOptions | None = None,
        *,
        max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES,
    ) -> "RedisStore":
        """A store that connects at its first use; `redis_clients.URL_FORMS` has the forms of a URL.

        User and password come from the URL of one server, or from the options. Options of redis-py may follow in such
        a URL, such as `?client_name=a`. Raises `ValueError` when the URL can't be used.
        """
        client, sentinel = open_client(url, options or ConnectionOptions())
        return cls(client, sentinel=sentinel, max_value_bytes=max_value_bytes)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Store.get_many`. What is no string, or is above `max_value_bytes`, counts as missing.

        GETRANGE and not MGET, so that the server sends no more of a value of somebody else than we would ever write;
        for 1,024 keys of 2.5 kB it took 18 ms where MGET took 7, for one key the same.
        """
        with _as_store_errors(f"reading {len(keys)} keys"):
            answers = await self._pipelined([("GETRANGE", key, 0, self._max_value_bytes) for key in keys], _WRONG_TYPE)
        return [
            answer if isinstance(answer, bytes) and 0 < len(answer) <= self._max_value_bytes else None
            for answer in answers
        ]

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        """See `Store.set_many`; a pipeline of SET PX. A value above `max_value_bytes` is refused."""
        ttl_ms = _milliseconds(ttl_s)
        fit = {key: value for key, value in values.items() if len(value) <= self._max_value_bytes}
        with _as_store_errors(f"writing {len(values)} keys"):
            await self._pipelined([("SET", key, value, "PX", ttl_ms) for key, value in fit.items()])
        refuse_too_large([key for key in values if key not in fit], values, self._max_value_bytes)

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        """See `Store.touch_many`; a pipeline of PEXPIRE."""
        ttl_ms = _milliseconds(ttl_s)
        with _as_store_errors(f"extending {len(keys)} keys"):
            return [bool(found) for found in await self._pipelined([("PEXPIRE", key, ttl_ms) for key in keys])]

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        """See `Store.set_if_absent_many`; a pipeline of SET NX PX."""
        ttl_ms = _milliseconds(ttl_s)
        with _as_store_errors(f"claiming {len(values)} keys"):
            commands = [("SET", key, value, "NX", "PX", ttl_ms) for key, value in values.items()]
            return [bool(written) for written in await self._pipelined(commands)]

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        """See `Store.delete_if_equal_many`; one EVAL, in a cluster one for each hash slot."""
        groups = self._by_slot(list(values))
        commands = [("EVAL", _DELETE_IF_EQUAL, len(keys), *keys, *(values[key] for key in keys)) for keys in groups]
        deleted: dict[str, bool] = {}
        with _as_store_errors(f"releasing {len(values)} keys"):
            for keys, flags in zip(groups, await self._pipelined(commands), strict=True):
                deleted |= zip(keys, map(bool, flags), strict=True)
        return [deleted[key] for key in values]

    async def set_forever(self, key: str, value: bytes) -> None:
        """See `Store.set_forever`; a SET without TTL. A server whose policy is `allkeys-…` may still evict it."""
        if len(value) > self._max_value_bytes:
            refuse_too_large([key], {key: value}, self._max_value_bytes)
        with _as_store_errors(f"writing {key}"):
            await self._pipelined([("SET", key, value)])

    async def delete(self, key: str) -> bool:
        """See `Store.delete`; DEL."""
        with _as_store_errors(f"deleting {key}"):
            [deleted] = await self._pipelined([("DEL", key)])
            return bool(deleted)

    async def ping(self) -> None:
        """See `Store.ping`; in a cluster, one of its masters answers."""
        with _as_store_errors("a ping"):
            await self._client.ping()

    async def close(self) -> None:
        """See `Store.close`."""
        with _as_store_errors("closing"):
            await self._client.aclose()
            if isinstance(self._client, RedisCluster):
                # After an error the client counts as not initialised, and `aclose` leaves its connections open.
                await self._client.nodes_manager.aclose()
                await self._client.nodes_manager.aclose("startup_nodes")
            if self._sentinel is not None:
                await self._sentinel.aclose()

    async def _pipelined(self, commands: Sequence[tuple[Any, ...]], ignored: tuple[str, ...] = ()) -> list[Any]:
        """The answers of all commands, not as a transaction; the first error is raised after each had its turn.

        ignored: first words of errors that stay among the answers
        """
        if not commands:
            return []
        async with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, Exception) and not str(answer).startswith(ignored):
                await self._forget_connections(answer)
                raise answer
        return answers

    async def _forget_connections(self, error: Exception) -> None:
        """Makes the next command find its server anew, where `error` says that it may be another one by now."""
        if isinstance(self._client, RedisCluster):
            if isinstance(error, _LOST):
                await self._client.aclose()  # which the next command undoes by asking for the slots again
        elif isinstance(error, exceptions.ReadOnlyError):
            # A master that was demoted, reached by a name that leads elsewhere now; connections to it would live on.
            await self._client.connection_pool.disconnect(inuse_connections=False)

    def _by_slot(self, keys: Sequence[str]) -> list[list[str]]:
        if not isinstance(self._client, RedisCluster):
            return [list(keys)] if keys else []
        groups: dict[int, list[str]] = {}
        for key in keys:
            groups.setdefault(self._client.keyslot(key), []).append(key)
        return list(groups.values())


_REASONS: tuple[tuple[type[BaseException], StoreReason], ...] = (
    (exceptions.TimeoutError, "timeout"),
    (exceptions.MaxConnectionsError, "busy"),
    (exceptions.BusyLoadingError, "loading"),
    (exceptions.AuthenticationError, "auth"),
    (exceptions.AuthorizationError, "auth"),
    (exceptions.AuthenticationWrongNumberOfArgsError, "auth"),
    (exceptions.NoPermissionError, "permission"),
    (exceptions.ReadOnlyError, "readonly"),
    (exceptions.OutOfMemoryError, "oom"),
    (exceptions.AskError, "cluster"),  # MOVED is one of them
    (exceptions.TryAgainError, "cluster"),
    (exceptions.ClusterError, "cluster"),
    (exceptions.RedisClusterException, "cluster"),
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


def _root(error: BaseException) -> BaseException:
    """What went wrong, where redis-py wraps it: a failed handshake on a unix socket arrives as a ConnectionError."""
    cause = error.__cause__
    wraps = type(error) in (exceptions.ConnectionError, exceptions.RedisClusterException)
    known = isinstance(cause, exceptions.RedisError | exceptions.RedisClusterException)
    return _root(cause) if cause is not None and wraps and known else error


def _milliseconds(ttl_s: float) -> int:
    return max(1, round(1_000 * positive(ttl_s)))
