"""What a store comes to when real servers fail: the right word in time, and recovery by itself."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.label_cache import EmbeddedServer, StoreError
from deploy.label_cache.breaker import BreakerStore
from deploy.label_cache.opening import open_store
from deploy.label_cache.redis_clients import ConnectionOptions
from deploy.label_cache.redis_store import RedisStore
from deploy.label_cache.store import Store
from deploy.settings import LabelCacheSettings

MIB = 2**20
QUICK = ConnectionOptions(connect_timeout_s=5, read_timeout_s=5, retries=0)
SHORT = replace(QUICK, read_timeout_s=0.2)
PATIENT = ConnectionOptions(connect_timeout_s=30, read_timeout_s=30)
GONE = {"connect", "timeout", "open", "loading", "cluster"}
"""What callers may see while a server dies and comes back."""

Until = Callable[[Callable[[], bool]], Awaitable[None]]

pytestmark = pytest.mark.redis


@asynccontextmanager
async def opened(url: str, options: ConnectionOptions = QUICK, **more: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore.from_url(url, options, **more)
    try:
        yield store
    finally:
        with suppress(StoreError):
            await store.close()


async def reason_of(work: Awaitable[object]) -> str | None:
    """What a call comes to: None when it is answered. Whatever else it raises is a failure of the test."""
    async with asyncio.timeout(30):  # against a call that hangs, which no call may
        try:
            await work
        except StoreError as error:
            return error.reason
    return None


async def works_again(store: Store, values: dict[str, bytes] | None = None) -> None:
    """Returns once a write and a read come through; until then only reasons that a failing server excuses."""
    values = values or {"again": b"1"}
    async with asyncio.timeout(60):
        while (reason := await reason_of(store.set_many(values, 60))) is not None:
            assert reason in GONE | {"readonly"}
            await asyncio.sleep(0.01)
    assert await store.get_many(list(values)) == list(values.values())


class Traffic:
    """Callers that write and read values which name their keys, all the time, and count what came of it."""

    def __init__(self, store: Store, callers: int = 8) -> None:
        self.answered = 0
        self.reasons: set[str] = set()
        self._wanted = 0
        self._went_on = asyncio.Event()
        self._store = store
        self._callers = callers

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Traffic"]:
        self._ended = False
        async with asyncio.TaskGroup() as group:
            for i in range(self._callers):
                group.create_task(self._call(i))
            try:
                yield self
            finally:
                self._ended = True

    async def go_on(self) -> None:
        """Returns once many more calls were answered."""
        self._wanted = self.answered + 5 * self._callers
        self._went_on.clear()
        async with asyncio.timeout(60):
            await self._went_on.wait()

    async def _call(self, caller: int) -> None:
        turn = 0
        while not self._ended:
            turn += 1
            values = {f"t{caller}-{turn}-{i}": f"{caller}-{turn}-{i};".encode() * 50 for i in range(5)}
            try:
                await self._store.set_many(values, 60)
                got = await self._store.get_many(list(values))
            except StoreError as error:
                self.reasons.add(error.reason)
                await asyncio.sleep(0.001)
                continue
            # What was written may be gone with the server that held it, but nothing else may stand there.
            for found, value in zip(got, values.values(), strict=True):
                assert found in (value, None)
            self.answered += 1
            if self.answered >= self._wanted:
                self._went_on.set()


class TestGoneAndBack:
    async def test_absent_at_the_start(self, new_server: Any) -> None:
        """A store whose server isn't there yet is reason "connect", and is used once it is."""
        server = new_server(start=False)
        async with opened(server.url) as store:
            assert await reason_of(store.get_many(["a"])) == "connect"
            server.start()
            await works_again(store)

    async def test_killed_and_started_again_in_the_middle_of_traffic(self, new_server: Any, until: Until) -> None:
        """Callers see answers or an excused reason, never another key's value, and all of them go on afterwards."""
        server = new_server()
        async with opened(server.url, QUICK) as store, Traffic(store).running() as traffic:
            for _ in range(2):
                await traffic.go_on()
                server.kill()
                await until(lambda: "connect" in traffic.reasons)
                server.start()
                await traffic.go_on()
                assert traffic.reasons <= GONE
                traffic.reasons.clear()

    async def test_behind_a_breaker(self, new_server: Any, proxy: Any) -> None:
        """After 5 failures a dead server isn't asked any more; when it is back, one call finds that out."""
        server = new_server(start=False)
        proxy.upstream_port = server.port
        now = 0.0
        async with opened(proxy.url) as inner:
            store = BreakerStore(inner, failures=5, open_s=5, clock=lambda: now)
            assert [await reason_of(store.get_many(["a"])) for _ in range(20)] == ["connect"] * 5 + ["open"] * 15
            assert proxy.connections == 5
            now = 5.0
            assert [await reason_of(store.get_many(["a"])) for _ in range(3)] == ["connect", "open", "open"]
            assert proxy.connections == 6
            server.start()
            assert await reason_of(store.get_many(["a"])) == "open"
            now = 10.0
            assert [await reason_of(store.get_many(["a"])) for _ in range(3)] == [None] * 3
            assert store.state == "closed"

    async def test_as_the_settings_open_it(self, new_server: Any) -> None:
        """The store that an application has opens its breaker, and recovers by itself."""
        server = new_server(start=False)
        settings = LabelCacheSettings(url=server.url, breaker_failures=2, breaker_open_s=0.1)
        store = open_store(settings)
        assert isinstance(store, BreakerStore)
        assert [await reason_of(store.ping()) for _ in range(3)] == ["connect", "connect", "open"]
        server.start()
        await works_again(store)
        assert (store.state, store.times_opened) == ("closed", 1)
        await store.close()

    async def test_the_embedded_server_moves(self) -> None:
        """An embedded server that died and was started elsewhere is found again by the store that followed it."""
        with EmbeddedServer() as first, EmbeddedServer() as second:
            url = first.url

            async def address() -> str:
                return url

            store = open_store(LabelCacheSettings(breaker_failures=1, breaker_open_s=0.01), address)
            assert store is not None
            await works_again(store)
            first.stop()
            url = second.url
            await works_again(store)
            await store.close()


class TestNoAnswer:
    async def test_a_frozen_server(self, new_server: Any) -> None:
        """A stopped process, whose connections the kernel still accepts, is reason "timeout" on every method."""
        server = new_server()
        async with opened(server.url, SHORT) as store:
            await works_again(store)
            with server.frozen():
                for work in (
                    store.get_many(["a"]),
                    store.set_many({"a": b"A"}, 60),
                    store.touch_many(["a"], 60),
                    store.set_if_absent_many({"a": b"A"}, 60),
                    store.delete_if_equal_many({"a": b"A"}),
                    store.set_forever("a", b"A"),
                    store.delete("a"),
                    store.ping(),
                ):
                    assert await reason_of(work) == "timeout"
            await works_again(store)

    async def test_answers_that_stop_on_the_way(self, new_server: Any, proxy: Any) -> None:
        """Behind a proxy that stalls the breaker spares callers the wait; no late answer is taken for a new one."""
        server = new_server()
        proxy.upstream_port = server.port
        now = 0.0
        server.ask("MSET", "a", "A", "b", "B")
        proxy.answering.clear()
        async with opened(proxy.url, SHORT) as inner:
            store = BreakerStore(inner, failures=3, open_s=5, clock=lambda: now)
            assert [await reason_of(store.get_many(["a"])) for _ in range(5)] == ["timeout"] * 3 + ["open"] * 2
            assert proxy.connections == 3
            proxy.answering.set()
            while await reason_of(store.get_many(["b"])) is not None:
                now += 5.0
            assert await store.get_many(["b", "a"]) == [b"B", b"A"]

    async def test_all_connections_wait(self, new_server: Any, proxy: Any, until: Until) -> None:
        """When as many calls wait as there may be connections, the next is reason "busy" at once."""
        proxy.upstream_port = new_server().port
        proxy.answering.clear()
        async with opened(f"{proxy.url}?max_connections=2", PATIENT) as store:
            waiting = [asyncio.create_task(store.get_many([f"{i}"])) for i in range(2)]
            await until(lambda: proxy.connections == 2)
            assert await reason_of(store.get_many(["a"])) == "busy"
            proxy.answering.set()
            assert await asyncio.gather(*waiting) == [[None], [None]]
            await works_again(store)


class TestServersThatRefuse:
    async def test_full(self, new_server: Any) -> None:
        """A server without room refuses writes with "oom", serves reads and deletes, and takes writes again later."""
        server = new_server("maxmemory-policy noeviction")
        async with opened(server.url, PATIENT) as store:
            await store.set_many({"a": b"A", "k0": os.urandom(MIB)}, 60)
            server.ask("CONFIG", "SET", "maxmemory", "1mb")
            assert await reason_of(store.set_many({"b": b"B"}, 60)) == "oom"
            assert await reason_of(store.set_if_absent_many({"b": b"B"}, 60)) == "oom"
            assert await reason_of(store.set_forever("b", b"B")) == "oom"
            assert await store.get_many(["a", "b"]) == [b"A", None]
            assert await store.delete("a")
            server.ask("CONFIG", "SET", "maxmemory", "0")
            await works_again(store)

    async def test_a_replica(self, new_server: Any, until: Until) -> None:
        """A replica refuses writes with "readonly" and serves reads; once it is a master it takes writes."""
        master = new_server()
        replica = new_server(f"replicaof 127.0.0.1 {master.port}")
        async with opened(master.url) as store:
            await store.set_many({"a": b"A"}, 60)
        async with opened(replica.url) as store:
            await until(lambda: replica.ask("GET", "a") == b"A")
            assert await reason_of(store.set_many({"a": b"B"}, 60)) == "readonly"
            assert await reason_of(store.delete_if_equal_many({"a": b"A"})) == "readonly"
            assert await store.get_many(["a"]) == [b"A"]
            replica.ask("REPLICAOF", "NO", "ONE")
            await works_again(store)

    async def test_a_name_that_leads_to_another_master(self, new_server: Any, proxy: Any) -> None:
        """After a refused write, connections to a master that was demoted are dropped, and the name is asked anew."""
        demoted, promoted = new_server(), new_server()
        proxy.upstream_port = demoted.port
        async with opened(proxy.url) as store:
            await works_again(store)
            demoted.ask("REPLICAOF", "127.0.0.1", promoted.port)
            proxy.upstream_port = promoted.port
            assert await reason_of(store.set_many({"a": b"A"}, 60)) == "readonly"
            assert await reason_of(store.set_many({"a": b"A"}, 60)) is None
            assert promoted.ask("GET", "a") == b"A"

    async def test_loading(self, new_server: Any) -> None:
        """A server that reads its data from disk is reason "loading", and then works."""
        server = new_server("enable-debug-command yes", "loading-process-events-interval-bytes 1024")
        async with opened(server.url, PATIENT) as store:
            await store.set_many({f"k{i}": os.urandom(2_000) for i in range(300)}, 600)
        server.ask("SAVE")
        server.kill()
        slow = server.conf.read_text()
        server.conf.write_text(f"{slow}key-load-delay 20000\n")  # microseconds a key
        server.start()
        async with opened(server.url, PATIENT) as store:
            assert await reason_of(store.get_many(["k1"])) == "loading"
            server.ask("CONFIG", "SET", "key-load-delay", "0")
            await works_again(store)
            assert [len(value or b"") for value in await store.get_many(["k1", "k299"])] == [2_000, 2_000]

    async def test_passwords(self, new_server: Any) -> None:
        """With the old password, or none, nobody gets in, which is reason "auth"; with the new one all is well."""
        server = new_server("requirepass new")
        async with opened(server.url) as store:
            assert await reason_of(store.get_many(["a"])) == "auth"
        async with opened(server.url, replace(QUICK, password="new")) as store:
            await works_again(store)
        async with opened(server.url, replace(QUICK, password="old")) as store:
            assert await reason_of(store.set_many({"a": b"A"}, 60)) == "auth"

    async def test_a_user_without_a_right(self, new_server: Any) -> None:
        """Commands and keys that a user may not use are "permission"; the others work, and the breaker stays closed."""
        server = new_server("user cache on >word ~mine:* +getrange +ping")
        async with opened(server.url, replace(QUICK, username="cache", password="word")) as inner:
            store = BreakerStore(inner, failures=1)
            assert await reason_of(store.set_many({"mine:a": b"A"}, 60)) == "permission"
            assert await reason_of(store.get_many(["other:a"])) == "permission"
            assert await store.get_many(["mine:a"]) == [None]
            assert store.state == "closed"


class TestLargeValues:
    async def test_of_a_huge_value_no_more_is_read_than_allowed(self, new_server: Any, proxy: Any) -> None:
        """50 MB at a key of ours count as absent, all but 1 MiB stays on the server, and a write replaces them."""
        server = new_server()
        server.ask("SET", "huge", bytes(50_000_000))
        proxy.upstream_port = server.port
        async with opened(proxy.url, PATIENT, max_value_bytes=MIB) as store:
            await store.set_many({"a": b"A"}, 60)
            assert await store.get_many(["a", "huge"]) == [b"A", None]
            assert MIB < proxy.forwarded_bytes < MIB + 10_000
            await store.set_many({"huge": b"B"}, 60)
            assert await store.get_many(["huge"]) == [b"B"]

    async def test_a_value_of_exactly_the_bound(self, new_server: Any) -> None:
        """What may be written may be read, to the byte."""
        async with opened(new_server().url, PATIENT, max_value_bytes=1_000) as store:
            await store.set_many({"a": b"x" * 1_000}, 60)
            assert await store.get_many(["a"]) == [b"x" * 1_000]
            assert await reason_of(store.set_many({"a": b"x" * 1_001}, 60)) == "too_large"


class TestCancelledCalls:
    async def hammer(self, store: Store, *, rounds: int, seed: int, keys: int = 40, size: int = 3_000) -> int:
        """Many reads at once of values that name their keys, a part of them cancelled at any time; how many ended."""
        choose = random.Random(seed)
        names = [f"k{i}" for i in range(keys)]
        values = {name: (name.encode() + b";") * (choose.randrange(1, size) // 4 + 1) for name in names}
        await store.set_many(values, 600)
        ended = 0

        async def read() -> None:
            nonlocal ended
            asked = choose.choices([*names, "none"], k=choose.randrange(1, 8))
            kind = choose.randrange(4)
            if kind == 0:
                assert await store.touch_many(asked, 600) == [name != "none" for name in asked]
            elif kind == 1:
                wrong = dict.fromkeys(asked, b"no such value")
                assert await store.delete_if_equal_many(wrong) == [False] * len(wrong)
            else:
                assert await store.get_many(asked) == [values.get(name) for name in asked]
            ended += 1

        for _ in range(rounds):
            tasks = [asyncio.create_task(read()) for _ in range(12)]
            for task in choose.sample(tasks, 8):
                for _ in range(choose.randrange(12)):
                    await asyncio.sleep(0)
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError), result
        assert await store.get_many(names) == list(values.values())
        return ended

    @pytest.mark.parametrize("piece_bytes", [7, 1_000, None])
    async def test_no_reader_gets_anothers_bytes(self, new_server: Any, proxy: Any, piece_bytes: int | None) -> None:
        """Through a proxy that answers in pieces, wherever calls are cancelled, each other call has its own answer."""
        proxy.upstream_port = new_server().port
        size = 40 if piece_bytes == 7 else 3_000
        async with opened(proxy.url, PATIENT) as store:
            proxy.piece_bytes = piece_bytes
            assert await self.hammer(store, rounds=40, seed=1, size=size) > 100

    @pytest.mark.nightly
    @pytest.mark.parametrize("seed", range(20))
    async def test_no_reader_gets_anothers_bytes_at_length(self, new_server: Any, proxy: Any, seed: int) -> None:
        """The same, in very many more places."""
        proxy.upstream_port = new_server().port
        async with opened(proxy.url, PATIENT) as store:
            proxy.piece_bytes = [7, 100, 1_000, None][seed % 4]
            await self.hammer(store, rounds=400, seed=seed, size=40 if seed % 4 == 0 else 3_000)

    async def test_neither_in_a_cluster(self, cluster: Any) -> None:
        """The same holds where an answer is put together from three servers'."""
        async with opened(cluster.url, replace(PATIENT, username="cache", password="word")) as store:
            assert await self.hammer(store, rounds=30, seed=2) > 50

    async def test_nor_over_tls(self, tls_server: Any, certificates: Any) -> None:
        """The same over TLS, whose records end in other places than answers do."""
        async with opened(tls_server.url, with_certificates(PATIENT, certificates)) as store:
            assert await self.hammer(store, rounds=30, seed=3) > 50

    async def test_callers_who_leave_cost_no_connections(self, new_server: Any) -> None:
        """After hundreds of cancelled calls a store still has all of its few connections."""
        async with opened(f"{new_server().url}?max_connections=12", PATIENT) as store:
            await self.hammer(store, rounds=60, seed=4)
            assert await asyncio.gather(*(reason_of(store.get_many(["a"])) for _ in range(12))) == [None] * 12


def with_certificates(options: ConnectionOptions, certificates: Any, ca: Path | None = None) -> ConnectionOptions:
    client = certificates.client
    return replace(
        options,
        username="cache",
        password="word",
        tls_ca_file=ca or certificates.ca,
        tls_cert_file=client,
        tls_key_file=certificates.key_of(client),
    )


class TestTls:
    async def test_a_server_that_another_authority_signed(self, tls_server: Any, certificates: Any) -> None:
        """It is not believed, even though it would answer."""
        async with opened(tls_server.url, with_certificates(QUICK, certificates, certificates.other_ca)) as store:
            assert await reason_of(store.get_many(["a"])) == "connect"
        async with opened(tls_server.url, replace(QUICK, username="cache", password="word")) as store:
            assert await reason_of(store.get_many(["a"])) == "connect"

    async def test_a_certificate_of_another_host(self, tls_server: Any, certificates: Any) -> None:
        """One that is signed, but for somebody else, is not believed either."""
        url = tls_server.url.replace("127.0.0.1", "localhost")
        async with opened(url, with_certificates(PATIENT, certificates)) as store:
            with pytest.raises(StoreError, match=r"(?i)certificate.*localhost|localhost.*certificate|verify") as caught:
                await store.get_many(["a"])
            assert caught.value.reason == "connect"

    async def test_without_a_certificate_of_our_own(self, tls_server: Any, certificates: Any) -> None:
        """A server that asks for one lets nobody in without; the reason is one that opens the breaker."""
        options = replace(with_certificates(QUICK, certificates), tls_cert_file=None, tls_key_file=None)
        async with opened(tls_server.url, options) as store:
            assert await reason_of(store.get_many(["a"])) in {"connect", "timeout", "unexpected"}

    async def test_in_the_clear_to_tls_and_the_other_way(
        self, tls_server: Any, certificates: Any, new_server: Any
    ) -> None:
        """Each is a failed connection, never a wait without end."""
        async with opened(tls_server.url.replace("rediss", "redis")) as store:
            assert await reason_of(store.get_many(["a"])) in GONE
        async with opened(new_server().url.replace("redis", "rediss"), with_certificates(QUICK, certificates)) as store:
            assert await reason_of(store.get_many(["a"])) in GONE

    async def test_sentinel_and_cluster_over_tls(self, new_server: Any, new_cluster: Any, certificates: Any) -> None:
        """`rediss` in front of the two means TLS to each of their servers, the Sentinels among them."""
        master = new_server("user cache on >word ~* &* +@all", tls=certificates)
        sentinel = new_server(
            "tls-replication yes",
            "user asker on >ask &* +sentinel|masters",
            f"sentinel monitor main 127.0.0.1 {master.port} 1",
            sentinel=True,
            tls=certificates,
        )
        options = replace(with_certificates(PATIENT, certificates), sentinel_username="asker", sentinel_password="ask")
        async with opened(f"rediss+sentinel://127.0.0.1:{sentinel.port}/main/3", options) as store:
            await works_again(store)
            assert master.ask("INFO", "keyspace")["db3"]["keys"] == 1
        one = new_cluster(masters=1, tls=certificates)
        async with opened(one.url.replace("redis", "rediss"), with_certificates(PATIENT, certificates)) as store:
            await works_again(store)


class TestSentinel:
    async def test_a_fail_over(self, new_sentinel_group: Any) -> None:
        """The master is killed in the middle of traffic; its replica is promoted, found and used by itself."""
        master, replica, sentinel = new_sentinel_group
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
        async with opened(url, QUICK) as store, Traffic(store).running() as traffic:
            await traffic.go_on()
            master.kill()
            await works_again(store)
            await traffic.go_on()
            assert traffic.reasons <= GONE | {"readonly"}
        assert replica.role() == "master"
        assert replica.ask("GET", "again") == b"1"

    @pytest.mark.nightly
    async def test_an_ordered_fail_over(self, new_sentinel_group: Any, until: Until) -> None:
        """A master that lives on as a replica of the new one is left too, though its connections stay good."""
        master, replica, sentinel = new_sentinel_group
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel.port}/main", QUICK) as store:
            await works_again(store)
            sentinel.ask("SENTINEL", "FAILOVER", "main")
            await until(lambda: master.role() == "slave")
            await works_again(store, {"after": b"2"})
            assert replica.ask("GET", "after") == b"2"

    async def test_sentinels_that_are_gone(self, new_sentinel_group: Any) -> None:
        """Connections that stand outlive the Sentinels; without any, reason "connect"; with them back, all is well."""
        _, _, sentinel = new_sentinel_group
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
        async with opened(url) as store:
            await works_again(store)
            sentinel.kill()
            await works_again(store)
            async with opened(url) as late:
                assert await reason_of(late.get_many(["a"])) == "connect"
                sentinel.start()
                await works_again(late)

    async def test_a_service_that_nobody_knows(self, sentinel_group: Any) -> None:
        """A wrong name of the service is reason "connect", and the message has the name."""
        async with opened(f"redis+sentinel://127.0.0.1:{sentinel_group[2].port}/other") as store:
            with pytest.raises(StoreError, match="other") as caught:
                await store.get_many(["a"])
            assert caught.value.reason == "connect"


class TestCluster:
    async def test_a_client_for_one_server(self, cluster: Any) -> None:
        """A cluster's node under the URL of one server is reason "cluster": most keys are elsewhere."""
        node = cluster.masters[0]
        async with opened(node.url, replace(QUICK, username="cache", password="word")) as store:
            assert await reason_of(store.get_many([f"k{i}" for i in range(50)])) == "cluster"

    async def test_a_server_that_is_no_cluster(self, new_server: Any) -> None:
        """The URL of a cluster for one server is reason "cluster", and the message says why."""
        async with opened(f"redis+cluster://127.0.0.1:{new_server().port}") as store:
            with pytest.raises(StoreError, match="not enabled") as caught:
                await store.get_many(["a"])
            assert caught.value.reason == "cluster"

    async def test_slots_that_move(self, cluster: Any) -> None:
        """While a slot moves, and after, its keys are found where they are: ASK and MOVED are followed."""
        source, target, third = cluster.masters
        here, there = (server.ask("CLUSTER", "MYID") for server in (source, target))
        slot = source.ask("CLUSTER", "KEYSLOT", "b")
        assert slot < 5_461
        everywhere = {f"k{i}": b"%d" % i for i in range(50)}
        async with opened(cluster.url, replace(PATIENT, username="cache", password="word")) as store:
            await store.set_many({"b": b"B", **everywhere}, 600)
            target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", here)
            source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", there)
            source.ask("MIGRATE", "127.0.0.1", target.port, "b", 0, 10_000)
            assert await store.get_many(["b", *everywhere]) == [b"B", *everywhere.values()]
            await store.set_many({"b": b"C"}, 600)
            for server in (target, source, third):
                server.ask("CLUSTER", "SETSLOT", slot, "NODE", there)
            assert await store.get_many(["b", *everywhere]) == [b"C", *everywhere.values()]
            assert await store.delete_if_equal_many({"b": b"C"}) == [True]

    async def test_nodes_that_die_and_come_back(self, new_cluster: Any) -> None:
        """Without one master calls fail with an excused reason; with it back, all keys are served again."""
        cluster = new_cluster()
        options = replace(QUICK, username="cache", password="word")
        keys = [f"k{i}" for i in range(30)]
        async with opened(cluster.url, options) as store:
            await works_again(store, dict.fromkeys(keys, b"1"))
            cluster.masters[1].kill()
            for _ in range(3):
                assert await reason_of(store.get_many(keys)) in GONE
            cluster.masters[1].start()
            await works_again(store, dict.fromkeys(keys, b"2"))

    async def test_all_nodes_absent_at_the_start(self, new_cluster: Any) -> None:
        """A cluster of which no node answers is reason "connect", and is used once it is there."""
        cluster = new_cluster()
        for server in cluster.masters:
            server.kill()
        options = replace(QUICK, username="cache", password="word")
        async with opened(cluster.url, options) as store:
            assert await reason_of(store.get_many(["a", "b", "c"])) == "connect"
            for server in cluster.masters:
                server.start()
            cluster.wait_until_ok()
            await works_again(store)

    async def test_a_frozen_node(self, new_cluster: Any) -> None:
        """A node that accepts and never answers is reason "timeout" or "connect", and is used when it wakes up."""
        cluster = new_cluster()
        keys = [f"k{i}" for i in range(30)]
        async with opened(cluster.url, replace(SHORT, username="cache", password="word")) as store:
            await works_again(store, dict.fromkeys(keys, b"1"))
            with cluster.masters[2].frozen():
                assert await reason_of(store.get_many(keys)) in {"timeout", "connect"}
            await works_again(store, dict.fromkeys(keys, b"2"))

    @pytest.mark.nightly
    async def test_a_fail_over(self, new_cluster: Any) -> None:
        """A master is killed in the middle of traffic; its replica is promoted, found, and used, without a restart."""
        cluster = new_cluster(replicas=1)
        options = replace(QUICK, username="cache", password="word")
        keys = [f"k{i}" for i in range(30)]
        async with opened(cluster.url, options) as store, Traffic(store).running() as traffic:
            await traffic.go_on()
            cluster.masters[0].kill()
            await works_again(store, dict.fromkeys(keys, b"2"))
            await traffic.go_on()
            assert traffic.reasons <= GONE
        assert cluster.replicas[0].role() == "master"
