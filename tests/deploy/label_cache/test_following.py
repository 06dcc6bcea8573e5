"""A store that moves: found again after it was started elsewhere, and never more than a failed store meanwhile."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from deploy.label_cache import MemoryStore, ServerError, StoreError
from deploy.label_cache.following import FollowingStore
from deploy.label_cache.store import StoreReason

Until = Callable[[Callable[[], bool]], Any]


class Site:
    """A store at an address; tests take it down."""

    def __init__(self) -> None:
        self.inner = MemoryStore(2**20)
        self.error: StoreReason | None = None
        self.closed = False

    async def _check(self) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise StoreError(self.error, "down")

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        await self._check()
        return await self.inner.get_many(keys)

    async def set_many(self, values: Mapping[str, bytes], ttl_s: float) -> None:
        await self._check()
        await self.inner.set_many(values, ttl_s)

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        await self._check()
        return await self.inner.touch_many(keys, ttl_s)

    async def ping(self) -> None:
        await self._check()

    async def close(self) -> None:
        self.closed = True


class World:
    """Where the store is, who asked for it, and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.url = "first"
        self.asked = 0
        self.error: BaseException | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.sites: dict[str, Site] = {}
        self.opened: list[str] = []
        self.store = FollowingStore(self.resolve, self.open, clock=lambda: self.now)

    async def resolve(self) -> str:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.url

    def open(self, url: str) -> Any:
        self.opened.append(url)
        return self.sites.setdefault(url, Site())


@pytest.fixture
def world() -> World:
    return World()


async def test_everything_passes_through(world: World) -> None:
    """Each call is the opened store's, and the address is asked for once, at the first."""
    assert world.asked == 0
    await world.store.set_many({"a": b"1"}, 10.0)
    assert await world.store.get_many(["a", "b"]) == [b"1", None]
    assert await world.store.touch_many(["a", "b"], 10.0) == [True, False]
    await world.store.ping()
    assert (world.asked, world.opened) == (1, ["first"])
    await world.store.close()
    assert world.sites["first"].closed


async def test_closing_what_was_never_used(world: World) -> None:
    """A store that nobody used asks for no address to be closed."""
    await world.store.close()
    assert world.asked == 0


async def test_simultaneous_first_calls_ask_once(world: World) -> None:
    """Callers that come while the address is being asked for share the answer."""
    await asyncio.gather(*(world.store.get_many(["a"]) for _ in range(5)))
    assert (world.asked, world.opened) == (1, ["first"])


async def test_it_follows_to_another_address(world: World) -> None:
    """After a lost connection the address is asked for again, and the store that is there now is used."""
    await world.store.ping()
    world.sites["first"].error = "connect"
    world.url = "second"
    with pytest.raises(StoreError) as caught:
        await world.store.get_many(["a"])
    assert caught.value.reason == "connect"
    assert world.sites["first"].closed
    world.now += 1.0
    await world.store.set_many({"a": b"2"}, 10.0)
    assert await world.sites["second"].inner.get_many(["a"]) == [b"2"]
    assert (world.asked, world.opened) == (2, ["first", "second"])


async def test_it_asks_once_a_second_at_most(world: World) -> None:
    """A store that is down costs one question a second; calls in between fail at once."""
    await world.store.ping()
    world.sites["first"].error = "connect"
    for now, asked in [(0.0, 1), (0.0, 1), (0.9, 1), (1.0, 2), (1.5, 2), (2.0, 3)]:
        world.now = now
        with pytest.raises(StoreError) as caught:
            await world.store.get_many(["a"])
        assert caught.value.reason == "connect"
        assert world.asked == asked
    world.sites["first"].error = None
    world.now = 3.0
    await world.store.ping()


async def test_callers_who_fail_together_ask_once(world: World) -> None:
    """Several calls that lose the same connection make one new question, not one each."""
    await world.store.ping()
    world.sites["first"].error = "connect"
    failed = await asyncio.gather(*(world.store.get_many(["a"]) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(error, StoreError) for error in failed)
    world.now += 1.0
    world.url = "second"
    await asyncio.gather(*(world.store.get_many(["a"]) for _ in range(5)))
    assert world.asked == 2


@pytest.mark.parametrize("reason", ["timeout", "oom", "auth", "server", "too_large"])
async def test_other_failures_move_nothing(world: World, reason: StoreReason) -> None:
    """A store that is slow, full or refuses is still where it was."""
    await world.store.ping()
    world.sites["first"].error = reason
    with pytest.raises(StoreError):
        await world.store.get_many(["a"])
    world.sites["first"].error = None
    await world.store.get_many(["a"])
    assert world.asked == 1


@pytest.mark.parametrize(
    "error",
    [ServerError("ended at its start"), OSError("no route"), TimeoutError(), RuntimeError("of another process")],
)
async def test_no_address_is_a_failed_connection(world: World, error: BaseException) -> None:
    """Whatever goes wrong in finding the store is a `StoreError` with its cause, and asked again after a second."""
    world.error = error
    with pytest.raises(StoreError) as caught:
        await world.store.ping()
    assert caught.value.reason == "connect"
    assert caught.value.__cause__ is error
    with pytest.raises(StoreError):
        await world.store.ping()
    assert world.asked == 1
    world.error, world.now = None, 1.0
    await world.store.ping()


async def test_an_address_that_can_not_be_opened(world: World) -> None:
    """An address that no store can be made of is a failed connection too."""

    def refuse(url: str) -> Any:
        raise ValueError("no such scheme")

    store = FollowingStore(world.resolve, refuse, clock=lambda: world.now)
    with pytest.raises(StoreError) as caught:
        await store.get_many(["a"])
    assert caught.value.reason == "connect"


async def test_a_question_that_hangs_costs_one_caller(world: World, until: Until) -> None:
    """A caller who gives up on an unanswered question is not followed by others who wait as long."""
    world.gate.clear()
    asking = asyncio.create_task(world.store.get_many(["a"]))
    await until(lambda: world.asked == 1)
    asking.cancel()
    await until(asking.done)
    with pytest.raises(StoreError):
        await world.store.get_many(["a"])
    assert world.asked == 1
    world.gate.set()
    world.now = 1.0
    assert await world.store.get_many(["a"]) == [None]
