"""The breaker: when it opens, whom it lets try, and what closes it; the clock is the test's."""

import asyncio
from collections.abc import Callable
from typing import Any, get_args

import pytest

from deploy.label_cache import MemoryStore, StoreError
from deploy.label_cache.breaker import BreakerStore
from deploy.label_cache.store import StoreReason
from deploy.label_cache.wrapper import StoreWrapper

FAILED_TWICE: tuple[StoreReason | None, ...] = ("timeout", "connect", None)

Until = Callable[[Callable[[], bool]], Any]


class Fragile(StoreWrapper):
    """A store in memory that fails as a test wants, and waits while its gate is shut."""

    def __init__(self) -> None:
        self.inner = MemoryStore(2**20)
        self.error: StoreReason | None = None
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = False

    async def _through(self, call: Any) -> Any:
        self.asked += 1
        error = self.error
        await self.gate.wait()
        if error is not None:
            raise StoreError(error, "down")
        return await call(self.inner)

    async def close(self) -> None:
        self.closed = True


class World:
    """A fragile store behind a breaker that opens at the third failure, for 10 seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.inner = Fragile()
        self.store = BreakerStore(self.inner, failures=3, open_s=10, patience_s=0.25, clock=lambda: self.now)

    @property
    def state(self) -> str:
        return self.store.state

    async def reason(self) -> str | None:
        """What a call comes to: None when it is answered."""
        try:
            await self.store.get_many(["a"])
        except StoreError as error:
            return error.reason
        return None

    async def open(self) -> None:
        """Makes the breaker open, and the store work again."""
        self.inner.error = "timeout"
        assert [await self.reason() for _ in range(3)] == ["timeout"] * 3
        self.inner.error, self.inner.asked = None, 0


@pytest.fixture
def world() -> World:
    return World()


async def test_everything_passes_while_the_store_works(world: World) -> None:
    """Each call is the store's own, and closing it too."""
    store = world.store
    await store.set_many({"a": b"1"}, 10)
    assert await store.get_many(["a", "b"]) == [b"1", None]
    assert await store.touch_many(["a"], 10) == [True]
    assert await store.set_if_absent_many({"a": b"2", "b": b"2"}, 10) == [False, True]
    assert await store.delete_if_equal_many({"b": b"2"}) == [True]
    await store.set_forever("c", b"3")
    assert await store.delete("c")
    await store.ping()
    await store.close()
    assert world.inner.closed
    assert (store.state, store.times_opened, store.refused) == ("closed", 0, 0)


async def test_it_opens_after_failures_in_a_row(world: World) -> None:
    """The third failure opens it; from then on the store isn't asked, and the answer comes at once."""
    world.inner.error = "connect"
    assert [await world.reason() for _ in range(5)] == ["connect"] * 3 + ["open"] * 2
    assert world.inner.asked == 3
    assert (world.state, world.store.times_opened, world.store.refused) == ("open", 1, 2)


async def test_a_success_in_between_counts_from_the_start(world: World) -> None:
    """A store that fails now and then is used all the time."""
    for _ in range(10):
        for error in FAILED_TWICE:
            world.inner.error = error
            assert await world.reason() == error
    assert world.state == "closed"


async def test_it_tries_again_after_its_time(world: World) -> None:
    """Not a moment before `open_s`; then one call decides that it closes."""
    await world.open()
    world.now += 9.99
    assert await world.reason() == "open"
    world.now += 0.01
    assert world.state == "half_open"
    assert await world.reason() is None
    assert world.state == "closed"
    assert world.inner.asked == 1
    world.inner.error = "timeout"
    assert [await world.reason() for _ in range(4)] == ["timeout"] * 3 + ["open"]
    assert world.store.times_opened == 2


async def test_a_failed_try_keeps_it_open(world: World) -> None:
    """One failure is enough then, and the next try comes `open_s` later."""
    await world.open()
    world.inner.error = "loading"
    world.now += 10
    assert [await world.reason(), await world.reason()] == ["loading", "open"]
    world.now += 9.99
    assert await world.reason() == "open"
    world.now += 0.01
    world.inner.error = None
    assert await world.reason() is None
    assert world.store.times_opened == 1


async def test_one_caller_tries_at_a_time(world: World, until: Until) -> None:
    """While one call is under way in the half-open state, all others are refused at once."""
    await world.open()
    world.now += 10
    world.inner.gate.clear()
    trying = asyncio.create_task(world.reason())
    await until(lambda: world.inner.asked == 1)
    assert [await world.reason() for _ in range(3)] == ["open"] * 3
    assert world.state == "half_open"
    world.inner.gate.set()
    assert await trying is None
    assert await world.reason() is None


@pytest.mark.parametrize("waited_s", [0.0, 0.25])
async def test_a_try_that_is_given_up_lets_another_try(world: World, until: Until, waited_s: float) -> None:
    """Given up early it decides nothing; given up after `patience_s` it counts as failed."""
    await world.open()
    world.now += 10
    world.inner.gate.clear()
    trying = asyncio.create_task(world.reason())
    await until(lambda: world.inner.asked == 1)
    world.now += waited_s
    trying.cancel()
    await until(trying.done)
    assert trying.cancelled()
    world.inner.gate.set()
    assert await world.reason() == ("open" if waited_s else None)
    world.now += 10
    assert await world.reason() is None


async def test_callers_who_give_up_open_it(world: World, until: Until) -> None:
    """A store that is slower than every caller's deadline is found out, though no call of it ever fails by itself."""
    world.inner.gate.clear()
    for waited_s, state in [(0.2, "closed"), (0.3, "closed"), (0.3, "closed"), (0.2, "closed"), (0.3, "open")]:
        before = world.inner.asked
        task = asyncio.create_task(world.reason())
        await until(lambda before=before: world.inner.asked > before)  # type: ignore[misc]
        world.now += waited_s
        task.cancel()
        await until(task.done)
        assert world.state == state


async def test_a_call_may_not_take_for_ever(world: World) -> None:
    """A call past `call_timeout_s` is reason "timeout", its cause kept, and a failure."""
    store = BreakerStore(world.inner, failures=1, call_timeout_s=0.001)
    world.inner.gate.clear()
    with pytest.raises(StoreError) as caught:
        await store.get_many(["a"])
    assert caught.value.reason == "timeout"
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert store.state == "open"


async def test_calls_from_before_decide_nothing_afterwards(world: World, until: Until) -> None:
    """Answers that arrive late, good or bad, don't close a breaker that opened meanwhile, nor open one that closed."""
    world.inner.gate.clear()
    good = [asyncio.create_task(world.reason()) for _ in range(3)]
    await until(lambda: world.inner.asked == 3)
    world.inner.error = "timeout"
    bad = [asyncio.create_task(world.reason()) for _ in range(9)]
    await until(lambda: world.inner.asked == 12)
    slow_gate, world.inner.gate = world.inner.gate, asyncio.Event()
    world.inner.gate.set()
    await world.open()
    assert world.state == "open"
    slow_gate.set()
    assert await asyncio.gather(*good) == [None] * 3
    assert world.state == "open"
    world.now += 10
    assert await world.reason() is None
    assert await asyncio.gather(*bad) == ["timeout"] * 9
    assert world.state == "closed"


@pytest.mark.parametrize("reason", get_args(StoreReason))
async def test_only_a_store_that_does_not_work_opens_it(world: World, reason: StoreReason) -> None:
    """A store that is full, read-only or refuses a command still answers others; one that lets nobody in does not."""
    world.inner.error = reason
    assert [await world.reason() for _ in range(3)] == [reason] * 3
    opens = reason in {"timeout", "connect", "auth", "loading", "cluster", "unexpected"}
    assert world.state == ("open" if opens else "closed")


@pytest.mark.parametrize(("reason", "state"), [("oom", "closed"), ("readonly", "closed"), ("busy", "half_open")])
async def test_what_a_refused_try_means(world: World, reason: StoreReason, state: str) -> None:
    """A refusal by the store shows that it is there; want of connections of our own shows nothing."""
    await world.open()
    world.now += 10
    world.inner.error = reason
    assert await world.reason() == reason
    assert world.state == state


async def test_mistakes_of_the_caller_count_as_nothing(world: World) -> None:
    """An error that isn't the store's passes, and leaves the count where it was."""
    world.inner.error = "timeout"
    for _ in range(2):
        assert await world.reason() == "timeout"
    world.inner.error = None
    with pytest.raises(ValueError, match="ttl_s"):
        await world.store.set_many({"a": b"1"}, 0)
    world.inner.error = "timeout"
    assert await world.reason() == "timeout"
    assert world.state == "open"


@pytest.mark.parametrize(
    ("option", "value"), [("failures", 0), ("open_s", 0.0), ("call_timeout_s", -1.0), ("patience_s", float("nan"))]
)
def test_options_out_of_bounds(option: str, value: float) -> None:
    """The error names the option and its value."""
    with pytest.raises(ValueError, match=f"{option} is {value}"):
        BreakerStore(MemoryStore(2**20), **{option: value})  # type: ignore[arg-type]
