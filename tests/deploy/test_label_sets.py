"""Label sets under an id: what the store holds, how long memory is believed, and what a broken store costs."""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytest

from deploy.label_cache.server import EmbeddedServer
from deploy.label_cache.store import MemoryStore, StoreError
from deploy.label_sets import (
    Definition,
    LabelSets,
    LabelSetsUnavailableError,
    PinnedLabelSetError,
    UnknownLabelSetError,
)
from tokenalign import LabelSet
from tokenalign.errors import InputError

MIB = 2**20
LABELS = LabelSet.of(["card payment", {"name": "Bargeld", "description": ["cash", "naïve 日本 👍"]}, "a, b"])
BANKING = Definition.of(LABELS, "banking")
KEY = f"tokenalign:data:set:{BANKING.set_id}"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SwitchedStore(MemoryStore):
    """A store that counts reads, and fails or hangs while it is told to."""

    def __init__(self) -> None:
        super().__init__(MIB)
        self.reads = 0
        self.broken = False
        self.hanging = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads += 1
        await self._fail()
        await self.gate.wait()
        return await super().get_many(keys)

    async def set_forever(self, key: str, value: bytes) -> None:
        await self._fail()
        await super().set_forever(key, value)

    async def delete(self, key: str) -> bool:
        await self._fail()
        return await super().delete(key)

    async def _fail(self) -> None:
        if self.broken:
            raise StoreError("connect", "private words")
        if self.hanging:
            await asyncio.Event().wait()


@pytest.fixture
async def store() -> SwitchedStore:
    return SwitchedStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sets(store: SwitchedStore, clock: Clock) -> LabelSets:
    return LabelSets(store, clock=clock)


@pytest.fixture
def others(store: SwitchedStore, clock: Clock) -> LabelSets:
    """Another replica's."""
    return LabelSets(store, clock=clock)


class TestKeeping:
    async def test_another_replica_knows_it(self, sets: LabelSets, others: LabelSets) -> None:
        """What one replica kept, another gets whole: name, labels, descriptions and their order."""
        await sets.keep(BANKING)
        found = await others.get(BANKING.set_id)
        assert found == BANKING
        assert found.labels.descriptions == LABELS.descriptions

    async def test_a_hit_in_memory_is_the_same_object(self, sets: LabelSets, store: SwitchedStore) -> None:
        """Within the memory's time neither the store is asked nor anything built anew."""
        await sets.keep(BANKING)
        first, second = await sets.get(BANKING.set_id), await sets.get(BANKING.set_id)
        assert first.labels is second.labels is LABELS
        assert store.reads == 0

    async def test_the_first_order_stays(self, sets: LabelSets) -> None:
        """The same labels in another order have the same id, and are known already, in the order first kept."""
        await sets.keep(BANKING)
        turned = Definition.of(LabelSet(LABELS.labels[::-1]), "other name")
        assert turned.set_id == BANKING.set_id
        assert await sets.known(turned) == BANKING

    async def test_known_asks_the_store_anew(self, sets: LabelSets, others: LabelSets) -> None:
        """What another replica has deleted a moment ago is not known, though it stands in memory here."""
        await sets.keep(BANKING)
        await others.delete(BANKING.set_id)
        assert await sets.known(BANKING) is None

    async def test_in_a_real_server_it_never_expires(self) -> None:
        """Over Valkey: the definition comes back, has no time to live, and is JSON that names its version."""
        import redis

        from deploy.label_cache.redis_store import RedisStore

        with EmbeddedServer(max_memory_bytes=64 * MIB) as server:
            sets, others = (LabelSets(RedisStore.from_url(server.url), store_budget_s=60) for _ in range(2))
            await sets.keep(BANKING)
            assert await others.get(BANKING.set_id) == BANKING
            with redis.Redis.from_url(server.url, protocol=2) as client:
                assert client.keys() == [KEY.encode()]
                assert client.ttl(KEY) == -1
                assert json.loads(client.get(KEY) or b"")["version"] == 1
            await others.delete(BANKING.set_id)
            assert await others.known(BANKING) is None
            await sets.close()
            await others.close()

    async def test_a_large_definition_is_refused(self, store: SwitchedStore) -> None:
        """Definitions take room until somebody deletes them, so each is bounded; the error names limit and remedy."""
        sets = LabelSets(store, max_bytes=200)
        for refused in (sets.known(BANKING), sets.keep(BANKING)):
            with pytest.raises(InputError, match=r"at most 200 are kept \(label_sets.max_bytes\); shorten") as caught:
                await refused
            assert caught.value.loc == ("labels",)
        assert store.reads == 0

    async def test_memory_is_bounded(self, store: SwitchedStore) -> None:
        """What was used least recently leaves memory, and is asked of the store again."""
        sets = LabelSets(store, memory_bytes=20_000)
        kept = [Definition.of(LabelSet.of([f"label {i}", "other"]), None) for i in range(100)]
        for definition in kept:
            await sets.keep(definition)
        assert await sets.get(kept[-1].set_id) == kept[-1]
        assert store.reads == 0
        assert await sets.get(kept[0].set_id) == kept[0]
        assert store.reads == 1


class TestUnknown:
    async def test_the_error_says_what_to_do(self, sets: LabelSets) -> None:
        """An id that the store does not have: post the labels again."""
        with pytest.raises(UnknownLabelSetError, match="POST /v1/label-sets again"):
            await sets.get(BANKING.set_id)

    @pytest.mark.parametrize("set_id", ["", "x", "A" * 32, "0" * 33, "é" * 32, "0" * 31 + "\n", f"x:{'0' * 32}"])
    async def test_what_is_no_id_never_reaches_the_store(
        self, sets: LabelSets, store: SwitchedStore, set_id: str
    ) -> None:
        """A string that can't be an id becomes no key, neither to read nor to delete."""
        with pytest.raises(UnknownLabelSetError):
            await sets.get(set_id)
        store.broken = True
        await sets.delete(set_id)
        assert store.reads == 0

    async def test_many_at_once_ask_once(self, sets: LabelSets, store: SwitchedStore, until: Any) -> None:
        """Requests that need the same set at the same moment share one question, also when one of them goes away."""
        await sets.keep(BANKING)
        fresh = LabelSets(store)
        store.gate.clear()
        gone, *waiting = [asyncio.create_task(fresh.get(BANKING.set_id)) for _ in range(10)]
        await until(lambda: store.reads > 0)
        gone.cancel()
        store.gate.set()
        assert [found.name for found in await asyncio.gather(*waiting)] == ["banking"] * 9
        assert store.reads == 1
        with pytest.raises(asyncio.CancelledError):
            await gone


class TestDeleting:
    async def test_twice_is_as_once(self, sets: LabelSets) -> None:
        """After a delete the set is unknown; another delete changes nothing and is no error."""
        await sets.keep(BANKING)
        for _ in range(2):
            await sets.delete(BANKING.set_id)
            with pytest.raises(UnknownLabelSetError):
                await sets.get(BANKING.set_id)
        assert sets.stats.deleted == 1

    async def test_other_replicas_heed_it_within_the_memorys_time(
        self, sets: LabelSets, others: LabelSets, clock: Clock
    ) -> None:
        """A replica that holds a deleted set uses it for 10 seconds more, and not longer, however often it is asked."""
        await sets.keep(BANKING)
        await others.get(BANKING.set_id)
        await sets.delete(BANKING.set_id)
        for _ in range(9):
            clock.now += 1.0
            assert await others.get(BANKING.set_id) == BANKING
        clock.now += 1.1
        with pytest.raises(UnknownLabelSetError):
            await others.get(BANKING.set_id)


class TestBrokenStore:
    async def test_without_memory(self, sets: LabelSets, store: SwitchedStore) -> None:
        """A store that fails is not an unknown id: every method says that it may pass, and nothing of the inside."""
        store.broken = True
        for call in (sets.get(BANKING.set_id), sets.known(BANKING), sets.keep(BANKING), sets.delete(BANKING.set_id)):
            with pytest.raises(LabelSetsUnavailableError, match="send the request again") as caught:
                await call
            assert caught.value.passing
            assert "private" not in str(caught.value)

    async def test_a_store_that_never_answers(self, store: SwitchedStore) -> None:
        """The budget ends the wait."""
        store.hanging = True
        with pytest.raises(LabelSetsUnavailableError, match="timeout"):
            await LabelSets(store, store_budget_s=0.01).get(BANKING.set_id)

    async def test_memory_is_used_on(self, sets: LabelSets, store: SwitchedStore, clock: Clock) -> None:
        """While the store fails, a set in memory is served past its time, and the store asked once in that time."""
        await sets.keep(BANKING)
        store.broken = True
        clock.now += 11
        for _ in range(3):
            assert await sets.get(BANKING.set_id) == BANKING
        assert store.reads == 1
        assert sets.stats.stale_hits == 1
        clock.now += 11
        store.broken = False
        assert await sets.get(BANKING.set_id) == BANKING
        assert (store.reads, sets.stats.store_hits) == (2, 1)

    async def test_a_delete_before_the_outage_is_heeded_after_it(
        self, sets: LabelSets, others: LabelSets, store: SwitchedStore, clock: Clock
    ) -> None:
        """What is served because the store fails ends with the outage."""
        await sets.keep(BANKING)
        await others.delete(BANKING.set_id)
        store.broken = True
        clock.now += 11
        assert await sets.get(BANKING.set_id) == BANKING
        store.broken = False
        clock.now += 11
        with pytest.raises(UnknownLabelSetError):
            await sets.get(BANKING.set_id)

    async def test_posting_trusts_no_memory(self, sets: LabelSets, store: SwitchedStore) -> None:
        """Who posts a set is told that it is kept only when the store says so."""
        await sets.keep(BANKING)
        store.broken = True
        with pytest.raises(LabelSetsUnavailableError):
            await sets.known(BANKING)

    async def test_no_store_at_all(self) -> None:
        """Where the settings name no store, every method names the setting, and that waiting won't help."""
        sets = LabelSets(None)
        for call in (sets.get(BANKING.set_id), sets.known(BANKING), sets.keep(BANKING), sets.delete(BANKING.set_id)):
            with pytest.raises(LabelSetsUnavailableError, match=r"label_cache.url is none.*redis://") as caught:
                await call
            assert not caught.value.passing
        await sets.close()


def entry(body: object, *, key: str = KEY, version: object = 1, checksum: object = None) -> bytes:
    """The documented form, written by hand."""
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    name = key.encode()
    own = hashlib.blake2b(len(name).to_bytes(8, "little") + name + data, digest_size=16).hexdigest()
    checksum = own if checksum is None else checksum
    return json.dumps({"version": version, "checksum": checksum, "definition": body}).encode()


GOOD = BANKING.json()
OTHER = Definition.of(LabelSet.of(["x", "y"]), None)
DAMAGED: dict[str, bytes] = {
    "no JSON": b"\x80\x05K\x01.",
    "no UTF-8": b'"\xff"',
    "JSON of another program": b"[]",
    "no object": b"1",
    "cut": entry(GOOD)[:-9],
    "deep": b"[" * 100_000,
    "flipped": entry(GOOD).replace(b"card", b"cord"),
    "of another key": entry(GOOD, key=KEY.replace("tokenalign", "elsewhere")),
    "of another set": entry(OTHER.json()),
    "an earlier version": entry(GOOD, version=0),
    "a version in words": entry(GOOD, version="1"),
    "a checksum of another type": entry(GOOD, checksum=7),
    "a checksum that is no text": entry(GOOD, checksum="\ud800"),
    "no labels": entry({"name": None}),
    "an empty list": entry({"name": None, "labels": []}),
    "labels that nobody may send": entry({"name": None, "labels": ["a", "a"]}),
    "a name of another type": entry({**GOOD, "name": 3}),
    "no name": entry({"labels": GOOD["labels"]}),
    "too large": entry({**GOOD, "name": "x" * MIB}),
}


class TestDamage:
    async def test_the_form_is_the_documented_one(self, sets: LabelSets, store: SwitchedStore) -> None:
        """Definitions outlive programs, so their form is pinned: what the documentation says can be read."""
        await store.set_forever(KEY, entry(GOOD))
        assert await sets.get(BANKING.set_id) == BANKING
        other = SwitchedStore()
        await LabelSets(other).keep(BANKING)
        assert await other.get_many([KEY]) == [entry(GOOD)]

    @pytest.mark.parametrize("value", DAMAGED.values(), ids=DAMAGED.keys())
    async def test_a_damaged_value_counts_as_unknown(
        self, sets: LabelSets, store: SwitchedStore, value: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is neither served nor a 500; it is counted and logged, and posting the set again mends it."""
        await store.set_forever(KEY, value)
        with pytest.raises(UnknownLabelSetError):
            await sets.get(BANKING.set_id)
        assert sets.stats.damaged == 1
        assert BANKING.set_id in caplog.text
        assert await sets.known(BANKING) is None
        await sets.keep(BANKING)
        assert await LabelSets(store).get(BANKING.set_id) == BANKING

    async def test_a_later_version(self, sets: LabelSets, store: SwitchedStore) -> None:
        """What a newer program wrote is there, but not for this one: 503 and not 404, until it is posted again."""
        await store.set_forever(KEY, entry({"anything": 1}, version=2))
        with pytest.raises(LabelSetsUnavailableError, match="version 2, this program reads 1") as caught:
            await sets.get(BANKING.set_id)
        assert caught.value.passing
        assert await sets.known(BANKING) is None
        await sets.keep(BANKING)
        assert await LabelSets(store).get(BANKING.set_id) == BANKING


class TestTenants:
    async def test_apart(self, sets: LabelSets) -> None:
        """Each tenant knows, and deletes, only what is the own; who names none is one of them."""
        await sets.keep(BANKING, tenant="one")
        for tenant in ("two", None):
            assert await sets.known(BANKING, tenant=tenant) is None
            with pytest.raises(UnknownLabelSetError):
                await sets.get(BANKING.set_id, tenant=tenant)
            await sets.delete(BANKING.set_id, tenant=tenant)
        assert await sets.get(BANKING.set_id, tenant="one") == BANKING
        await sets.delete(BANKING.set_id, tenant="one")
        assert await sets.known(BANKING, tenant="one") is None

    async def test_keys_show_no_tenant(self, sets: LabelSets, store: SwitchedStore) -> None:
        """A tenant's words don't stand in the store."""
        await sets.keep(BANKING, tenant="somebody")
        assert all("somebody" not in key for key in store._forever)


class TestPinned:
    async def test_known_without_the_store(self, sets: LabelSets, store: SwitchedStore) -> None:
        """A set of the settings is known to every tenant, whatever the store says, and is not deleted."""
        sets.pin(BANKING)
        store.broken = True
        assert await sets.get(BANKING.set_id) is BANKING
        assert await sets.get(BANKING.set_id, tenant="one") is BANKING
        assert await sets.known(BANKING) is BANKING
        with pytest.raises(PinnedLabelSetError, match="remove it there"):
            await sets.delete(BANKING.set_id)
