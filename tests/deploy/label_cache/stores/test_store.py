"""One contract for every store, and Redis's faults as typed errors."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from deploy.label_cache.redis_clients import ConnectionOptions
from deploy.label_cache.redis_store import RedisStore
from deploy.label_cache.server import EmbeddedServer
from deploy.label_cache.store import MemoryStore, Store, StoreError

MIB = 2**20
EVERY_BYTE = bytes(range(256)) + b"\r\n$-1\r\n*0\r\n"


@pytest.fixture(scope="module")
def valkey() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(max_memory_bytes=128 * MIB) as server:
        yield server


@pytest.fixture(scope="module")
def debian(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """Debian's redis-server on loopback with a password: its directory is too long for a socket."""
    deep = tmp_path_factory.mktemp("d" * 110)
    with EmbeddedServer(max_memory_bytes=128 * MIB, binary=Path(redis_binary), directory=deep) as server:
        yield server


REAL = [pytest.param(name, marks=pytest.mark.redis) for name in ("debian", "sentinel", "cluster", "tls")]


@pytest.fixture(params=["memory", "valkey", *REAL])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store of each kind: in memory, embedded, Debian's with a password, by Sentinel, cluster, TLS and ACL."""
    if request.param == "memory":
        yield MemoryStore(128 * MIB)
        return
    url, options = empty_server(request.param, request.getfixturevalue)
    store = RedisStore.from_url(url, options, max_value_bytes=16 * MIB)
    yield store
    await store.close()


PATIENT = ConnectionOptions(connect_timeout_s=30, read_timeout_s=30)  # many connect at once on a busy machine


def empty_server(name: str, fixture: Callable[[str], Any]) -> tuple[str, ConnectionOptions]:
    """The URL and options of a server of a kind, with nothing in it."""
    user = replace(PATIENT, username="cache", password="word")
    if name in ("valkey", "debian"):
        url = fixture(name).url
        with redis.Redis.from_url(url, protocol=2) as admin:
            admin.flushall()
        return url, PATIENT
    if name == "sentinel":
        master, _, sentinel = fixture("sentinel_group")
        flush(master)
        return f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main", PATIENT
    if name == "cluster":
        flush(*fixture("cluster").masters)
        return fixture("cluster").url, user
    flush(fixture("tls_server"))
    return fixture("tls_server").url, with_certificates(user, fixture("certificates"))


def flush(*servers: Any) -> None:
    for server in servers:
        with server.admin() as admin:
            admin.flushall()


def with_certificates(options: ConnectionOptions, certificates: Any) -> ConnectionOptions:
    client = certificates.client
    return replace(options, tls_ca_file=certificates.ca, tls_cert_file=client, tls_key_file=certificates.key_of(client))


@pytest.fixture
def admin(valkey: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey.url, protocol=2) as client:
        client.flushall()
        yield client


class TestContract:
    async def test_answers_come_in_the_order_of_the_keys(self, store: Store) -> None:
        """Every key has its own answer, a missing one None, a repeated one its value again."""
        await store.set_many({"a": b"A", "b": b"B"}, 60)
        assert await store.get_many(["b", "none", "a", "b"]) == [b"B", None, b"A", b"B"]

    async def test_any_bytes_come_back(self, store: Store) -> None:
        """Values with NUL, line ends and protocol words are the same afterwards."""
        await store.set_many({"k": EVERY_BYTE}, 60)
        assert await store.get_many(["k"]) == [EVERY_BYTE]

    async def test_a_large_value_comes_back(self, store: Store) -> None:
        """A value of 5 MiB, which takes many reads of a socket, is the same afterwards."""
        value = os.urandom(5 * MIB)
        await store.set_many({"k": value}, 60)
        assert await store.get_many(["k"]) == [value]

    async def test_the_last_write_holds(self, store: Store) -> None:
        """A second write of a key replaces its value."""
        await store.set_many({"k": b"old"}, 60)
        await store.set_many({"k": b"new"}, 60)
        assert await store.get_many(["k"]) == [b"new"]

    async def test_values_expire(self, store: Store) -> None:
        """After its TTL a value is missing."""
        await store.set_many({"short": b"1"}, 0.001)
        await store.set_many({"long": b"2"}, 60)
        while await store.get_many(["short"]) != [None]:
            pass
        assert await store.get_many(["short", "long"]) == [None, b"2"]

    async def test_touch_says_what_is_there(self, store: Store) -> None:
        """touch_many finds exactly the keys that exist."""
        await store.set_many({"a": b"A", "c": b"C"}, 60)
        assert await store.touch_many(["a", "b", "c"], 120) == [True, False, True]

    async def test_touch_sets_the_rest_of_a_life(self, store: Store) -> None:
        """touch_many gives a new TTL: here a shorter one, whose end can be waited for."""
        await store.set_many({"a": b"A", "b": b"B"}, 3_600)
        await store.touch_many(["a"], 0.001)
        while await store.get_many(["a"]) != [None]:
            pass
        assert await store.get_many(["b"]) == [b"B"]

    async def test_nothing_asked_nothing_done(self, store: Store) -> None:
        """Empty requests are fine."""
        assert await store.get_many([]) == []
        assert await store.touch_many([], 60) == []
        assert await store.set_if_absent_many({}, 60) == []
        assert await store.delete_if_equal_many({}) == []
        await store.set_many({}, 60)

    async def test_a_value_too_large_is_refused_and_the_others_are_written(self, store: Store) -> None:
        """The error names the key, its size and the limit; what fits is stored."""
        huge = bytes(129 * MIB) if isinstance(store, MemoryStore) else bytes(16 * MIB + 1)
        with pytest.raises(StoreError, match=rf"1 of 3 values.*huge has {len(huge)} bytes, at most") as caught:
            await store.set_many({"a": b"A", "huge": huge, "b": b"B"}, 60)
        assert caught.value.reason == "too_large"
        assert await store.get_many(["a", "huge", "b"]) == [b"A", None, b"B"]

    @pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
    async def test_a_life_of_nothing_is_refused(self, store: Store, ttl_s: float) -> None:
        """A TTL that isn't positive is a programming error, not a write without TTL."""
        with pytest.raises(ValueError, match="ttl_s"):
            await store.set_many({"k": b"v"}, ttl_s)
        with pytest.raises(ValueError, match="ttl_s"):
            await store.set_if_absent_many({"k": b"v"}, ttl_s)

    async def test_only_absent_keys_are_claimed(self, store: Store) -> None:
        """set_if_absent_many says in order which keys it wrote, and leaves the others as they were."""
        await store.set_many({"b": b"theirs"}, 60)
        assert await store.set_if_absent_many({"c": b"ours", "b": b"ours", "a": b"ours"}, 60) == [True, False, True]
        assert await store.get_many(["a", "b", "c"]) == [b"ours", b"theirs", b"ours"]

    async def test_a_claim_expires(self, store: Store) -> None:
        """A key that was claimed for a moment can be claimed again after it."""
        assert await store.set_if_absent_many({"a": b"1"}, 0.001) == [True]
        while await store.set_if_absent_many({"a": b"2"}, 60) != [True]:
            pass
        assert await store.get_many(["a"]) == [b"2"]

    async def test_of_many_who_claim_at_once_one_gets_it(self, store: Store) -> None:
        """20 callers at once: each key is claimed by exactly one of them, whose value it has."""
        keys = [f"k{i}" for i in range(10)]
        claims = await asyncio.gather(
            *(store.set_if_absent_many(dict.fromkeys(keys, b"%d" % i), 60) for i in range(20))
        )
        for key, claimed in zip(keys, zip(*claims, strict=True), strict=True):
            assert sum(claimed) == 1
            assert await store.get_many([key]) == [b"%d" % claimed.index(True)]

    async def test_only_equal_values_are_deleted(self, store: Store) -> None:
        """delete_if_equal_many says in order which keys held the value, deletes these and no other."""
        await store.set_many({"a": b"1", "b": EVERY_BYTE, "c": b"3"}, 60)
        assert await store.delete_if_equal_many({"c": b"3", "none": b"", "a": b"2", "b": EVERY_BYTE}) == [
            True,
            False,
            False,
            True,
        ]
        assert await store.get_many(["a", "b", "c"]) == [b"1", None, None]

    async def test_a_value_without_a_life_stays(self, store: Store) -> None:
        """set_forever replaces a value that expires, a later write with a TTL replaces it in turn."""
        await store.set_many({"a": b"old"}, 0.001)
        await store.set_forever("a", EVERY_BYTE)
        await store.set_many({"b": b"short"}, 0.001)
        while await store.get_many(["b"]) != [None]:
            pass
        assert await store.get_many(["a"]) == [EVERY_BYTE]
        await store.set_many({"a": b"short"}, 0.001)
        while await store.get_many(["a"]) != [None]:
            pass

    async def test_delete_says_whether_it_was_there(self, store: Store) -> None:
        """A key with or without a life is gone after delete, and a second delete finds nothing."""
        await store.set_many({"a": b"A", "other": b"O"}, 60)
        await store.set_forever("b", b"B")
        assert [await store.delete(key) for key in ("a", "b", "a", "b", "none")] == [True, True, False, False, False]
        assert await store.get_many(["a", "b", "other"]) == [None, None, b"O"]

    async def test_a_large_value_without_a_life_is_refused(self, store: Store) -> None:
        """set_forever has a bound of its own, and what was there before stays."""
        await store.set_forever("a", b"A")
        with pytest.raises(StoreError, match=rf"a .*{16 * MIB + 1} bytes") as caught:
            await store.set_forever("a", bytes(16 * MIB + 1))
        assert caught.value.reason == ("oom" if isinstance(store, MemoryStore) else "too_large")
        assert await store.get_many(["a"]) == [b"A"]

    async def test_concurrent_callers_get_their_own_answers(self, store: Store) -> None:
        """50 callers at once on one store never see each other's bytes."""

        async def one(i: int) -> None:
            value = f"{i}".encode() * (1 + 997 * i)
            await store.set_many({f"k{i}": value}, 60)
            assert await store.get_many([f"k{i}", f"none{i}"]) == [value, None]

        await asyncio.gather(*(one(i) for i in range(50)))

    async def test_a_caller_cancelled_in_mid_read_leaves_no_bytes_behind(self, store: Store) -> None:
        """Wherever a read is cancelled, the next reader gets its own key's value."""
        values = {f"k{i}": bytes([i]) * MIB for i in range(4)}
        await store.set_many(values, 60)
        for steps in range(0, 120, 3):
            task = asyncio.create_task(store.get_many(["k0", "k1"]))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await store.get_many(["k2"]) == [values["k2"]]

    async def test_it_can_be_closed_twice(self, store: Store) -> None:
        """ping answers before, and a second close is fine."""
        await store.ping()
        await store.close()
        await store.close()


class TestMemoryStore:
    async def test_expiry_follows_the_clock(self) -> None:
        """A value is there until its TTL has passed, and touch counts anew from now."""
        now = 100.0
        store = MemoryStore(MIB, clock=lambda: now)
        await store.set_many({"a": b"A", "b": b"B"}, 10)
        now = 109.9
        assert await store.touch_many(["a"], 10) == [True]
        now = 110.0
        assert await store.get_many(["a", "b"]) == [b"A", None]
        assert await store.touch_many(["b"], 10) == [False]
        now = 119.9
        assert await store.get_many(["a"]) == [None]

    async def test_it_is_bounded(self) -> None:
        """Writing more than fits keeps the newest values only."""
        store = MemoryStore(10 * 1024)
        for i in range(100):
            await store.set_many({f"k{i}": bytes(1024)}, 60)
        kept = [i for i in range(100) if await store.get_many([f"k{i}"]) != [None]]
        assert kept == list(range(100 - len(kept), 100))
        assert 0 < len(kept) < 10

    async def test_values_without_a_life_are_not_evicted(self) -> None:
        """Entries that expire make room among themselves only; a delete makes room for a value without a life."""
        store = MemoryStore(10 * 1024, max_forever_bytes=4 * 1024)
        await store.set_forever("a", b"A" * 3_000)
        await store.set_many({f"k{i}": bytes(1024) for i in range(100)}, 60)
        assert await store.get_many(["a"]) == [b"A" * 3_000]
        with pytest.raises(StoreError, match="delete some") as caught:
            await store.set_forever("b", b"B" * 3_000)
        assert caught.value.reason == "oom"
        await store.delete("a")
        await store.set_forever("b", b"B" * 3_000)
        assert await store.get_many(["a", "b"]) == [None, b"B" * 3_000]

    async def test_a_claim_ends_with_the_clock(self) -> None:
        """An expired value can be claimed, is not equal to itself any more, and can't be deleted."""
        now = 0.0
        store = MemoryStore(MIB, clock=lambda: now)
        await store.set_many({"a": b"A", "b": b"B", "c": b"C"}, 10)
        now = 10.0
        assert await store.delete_if_equal_many({"a": b"A"}) == [False]
        assert await store.delete("b") is False
        assert await store.set_if_absent_many({"c": b"D"}, 10) == [True]


@asynccontextmanager
async def opened(url: str, **options: float) -> AsyncIterator[RedisStore]:
    store = RedisStore.from_url(url, ConnectionOptions(retries=0, **options))  # type: ignore[arg-type]  # timeouts
    try:
        yield store
    finally:
        await store.close()


async def reason_of(work: Awaitable[object]) -> str:
    with pytest.raises(StoreError) as caught:
        await work
    assert caught.value.__cause__ is not None
    return caught.value.reason


class TestRedisFaults:
    async def test_nobody_listens(self, tmp_path: Path) -> None:
        """A refused connection and a missing socket are reason "connect", on every method."""
        for url in ("redis://127.0.0.1:1", f"unix://{tmp_path}/none.sock"):
            async with opened(url) as store:
                assert await reason_of(store.ping()) == "connect"
                assert await reason_of(store.get_many(["a"])) == "connect"
                assert await reason_of(store.set_many({"a": b"A"}, 1)) == "connect"
                assert await reason_of(store.touch_many(["a"], 1)) == "connect"
                assert await reason_of(store.set_if_absent_many({"a": b"A"}, 1)) == "connect"
                assert await reason_of(store.delete_if_equal_many({"a": b"A"})) == "connect"
                assert await reason_of(store.set_forever("a", b"A")) == "connect"
                assert await reason_of(store.delete("a")) == "connect"

    async def test_a_server_that_never_answers(self, tmp_path: Path) -> None:
        """One that accepts and stays silent is reason "timeout", after read_timeout_s."""
        closed = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1_024):
                pass
            writer.close()
            closed.set()

        path = tmp_path / "s"
        async with (
            await asyncio.start_unix_server(silent, path),
            opened(f"unix://{path}", read_timeout_s=0.05) as store,
        ):
            assert await reason_of(store.get_many(["a"])) == "timeout"
            await closed.wait()

    async def test_a_server_that_speaks_something_else(self, tmp_path: Path) -> None:
        """An answer that is not Redis's protocol is a StoreError too."""

        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        path = tmp_path / "s"
        async with await asyncio.start_unix_server(babble, path), opened(f"unix://{path}") as store:
            assert await reason_of(store.get_many(["a"])) in {"connect", "server", "unexpected"}

    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (b"-LOADING Redis is loading the dataset in memory", "loading"),
            (b"-MOVED 3999 127.0.0.1:6381", "cluster"),
            (b"-CLUSTERDOWN The cluster is down", "cluster"),
            (b"-READONLY You can't write against a read only replica.", "readonly"),
            (b"-OOM command not allowed when used memory > 'maxmemory'.", "oom"),
            (b"-NOAUTH Authentication required.", "auth"),
            (b"-NOPERM No permissions to run a command", "permission"),
            (b"-ERR unknown command", "server"),
        ],
    )
    async def test_each_kind_of_error_answer_has_its_reason(self, tmp_path: Path, answer: bytes, reason: str) -> None:
        """What a server can answer instead of doing the work is told apart by one word."""

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():  # "*3" and then, for each of 3 arguments, its length and itself
                if line.startswith(b"*"):
                    arguments = [(await reader.readline(), await reader.readline())[1] for _ in range(int(line[1:]))]
                    writer.write(b"+OK\r\n" if arguments[0].strip() == b"CLIENT" else answer + b"\r\n")
            writer.close()

        path = tmp_path / "s"
        async with await asyncio.start_unix_server(refuse, path), opened(f"unix://{path}") as store:
            assert await reason_of(store.get_many(["a"])) == reason
            assert await reason_of(store.set_many({"a": b"A"}, 1)) == reason

    @pytest.mark.redis
    async def test_passwords(self, debian: EmbeddedServer) -> None:
        """The right password given beside the URL works; a wrong or missing one is reason "auth"; none is shown."""
        secret, address = debian.url.removeprefix("redis://:").split("@")
        store = RedisStore.from_url(f"redis://{address}", ConnectionOptions(password=secret))
        await store.ping()
        await store.close()
        for url in (f"redis://{address}", f"redis://:wrong-{secret}@{address}"):
            async with opened(url) as store:
                with pytest.raises(StoreError) as caught:
                    await store.get_many(["a"])
                assert caught.value.reason == "auth"
                assert secret not in str(caught.value)

    async def test_a_wrong_password_on_a_socket(self, valkey: EmbeddedServer) -> None:
        """On a unix socket, where redis-py hides the refusal in a connection error, it is reason "auth" too."""
        async with opened(f"{valkey.url}?password=wrong") as store:
            assert await reason_of(store.get_many(["a"])) == "auth"

    async def test_an_acl_user_with_few_rights(self, valkey: EmbeddedServer, admin: redis.Redis) -> None:
        """A user with a store's few commands, below the namespace, is enough; elsewhere it is reason "permission"."""
        rights = ["+getrange", "+get", "+set", "+pexpire", "+del", "+eval", "+ping"]
        admin.acl_setuser("cache", enabled=True, passwords=["+word"], keys=["tokenalign:*"], commands=rights)
        store = RedisStore.from_url(valkey.url, ConnectionOptions(username="cache", password="word"))
        try:
            await store.ping()
            await store.set_many({"tokenalign:a": b"A"}, 60)
            assert await store.get_many(["tokenalign:a"]) == [b"A"]
            assert await store.touch_many(["tokenalign:a"], 60) == [True]
            assert await store.set_if_absent_many({"tokenalign:b": b"B"}, 60) == [True]
            assert await store.delete_if_equal_many({"tokenalign:b": b"B"}) == [True]
            await store.set_forever("tokenalign:c", b"C")
            assert await store.delete("tokenalign:c")
            assert await reason_of(store.get_many(["other:a"])) == "permission"
        finally:
            await store.close()
            admin.acl_deluser("cache")

    async def test_a_full_server(self, valkey: EmbeddedServer, admin: redis.Redis) -> None:
        """A server without room answers reason "oom", still serves reads, and takes writes again later."""
        async with opened(valkey.url) as store:
            await store.set_many({"a": b"A"}, 60)
            admin.config_set("maxmemory-policy", "noeviction")
            admin.config_set("maxmemory", "1mb")
            try:
                assert await reason_of(store.set_many({"b": bytes(MIB)}, 60)) == "oom"
                assert await store.get_many(["a", "b"]) == [b"A", None]
            finally:
                admin.config_set("maxmemory", str(128 * MIB))
                admin.config_set("maxmemory-policy", "volatile-lfu")
            await store.set_many({"b": b"B"}, 60)

    async def test_a_key_of_another_type_is_missing_and_overwritten(
        self, valkey: EmbeddedServer, admin: redis.Redis
    ) -> None:
        """A list at one of our keys, put there by someone else, costs a miss and no error."""
        admin.rpush("a", "x")
        async with opened(valkey.url) as store:
            assert await store.delete_if_equal_many({"a": b"x"}) == [False]
            assert await store.get_many(["a"]) == [None]
            await store.set_many({"a": b"A"}, 60)
            assert await store.get_many(["a"]) == [b"A"]

    async def test_every_write_has_its_ttl(self, valkey: EmbeddedServer, admin: redis.Redis) -> None:
        """No entry is ever without a TTL, since such a one could not be evicted."""
        async with opened(valkey.url) as store:
            await store.set_many({"a": b"A"}, 0.0001)
            await store.set_many({"b": b"B"}, 100)
            assert 0 < admin.pttl("b") <= 100_000
            await store.touch_many(["b"], 200)
            assert 100_000 < admin.pttl("b") <= 200_000

    async def test_it_recovers_when_the_server_comes_back(self) -> None:
        """A server that died and came back is used again by the same store, without a word from anyone."""
        with EmbeddedServer() as server:
            async with opened(server.url) as store:
                await store.set_many({"a": b"A"}, 60)
                assert server.pid is not None
                os.kill(server.pid, 9)
                while server.alive():
                    pass
                assert await reason_of(store.get_many(["a"])) == "connect"
                server.restart()
                assert await store.get_many(["a"]) == [None]


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "memcached://host",
            "redis://:hidden@host?no_such_option=1",
            "redis://:hidden@host?socket_timeout=soon",
            "redis://:hidden@host?decode_responses=True",
        ],
    )
    def test_a_url_that_can_not_work_is_refused_at_once(self, url: str) -> None:
        """The error comes at construction, not at the first request, and doesn't show the password."""
        with pytest.raises(ValueError, match="store's URL") as caught:
            RedisStore.from_url(url)
        assert "hidden" not in str(caught.value)

    @pytest.mark.parametrize("url", ["redis://user:a@host", "redis://:a@host", "unix:///s?password=a"])
    def test_credentials_come_from_one_place(self, url: str) -> None:
        """A password in the URL and another beside it is a mistake that is named."""
        with pytest.raises(ValueError, match="leave out one"):
            RedisStore.from_url(url, ConnectionOptions(password="b"))

    def test_nothing_is_connected_at_construction(self) -> None:
        """A store for a server that is absent can be made, also for TLS."""
        for url in ("redis://127.0.0.1:1", "rediss://127.0.0.1:1", "unix:///none"):
            RedisStore.from_url(url)
