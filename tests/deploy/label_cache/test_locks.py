"""Locks decide whose turn it is; they never keep anybody waiting past a bound, and free nothing of another's."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from deploy.label_cache.access import StoreAccess, StoreTimes
from deploy.label_cache.locks import LAST_PAUSE_S, LockTimes, Turn
from deploy.label_cache.stats import CacheStats
from deploy.label_cache.store import MemoryStore, StoreError

Until = Callable[[Callable[[], bool]], Any]


class Watched(MemoryStore):
    """A store that records what lives anew, and can lose the answer to a lock, or fail."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(2**20, clock=lambda: self.now)
        self.touched: list[tuple[list[str], float]] = []
        self.lose_answers = False
        self.error: StoreError | None = None

    async def touch_many(self, keys: Sequence[str], ttl_s: float) -> list[bool]:
        if self.error is not None:
            raise self.error
        self.touched.append((list(keys), ttl_s))
        return await super().touch_many(keys, ttl_s)

    async def set_if_absent_many(self, values: Mapping[str, bytes], ttl_s: float) -> list[bool]:
        absent = await super().set_if_absent_many(values, ttl_s)
        if self.error is not None:
            raise self.error
        return [False] * len(absent) if self.lose_answers else absent

    async def delete_if_equal_many(self, values: Mapping[str, bytes]) -> list[bool]:
        if self.error is not None:
            raise self.error
        return await super().delete_if_equal_many(values)


@pytest.fixture
def store() -> Watched:
    return Watched()


@pytest.fixture
def access(store: Watched) -> StoreAccess:
    return StoreAccess(store, CacheStats(), StoreTimes(60, 0, 60, 60))


@pytest.fixture
def turn(access: StoreAccess) -> Callable[..., Turn]:
    def make(*, ttl_s: float = 10, wait_s: float = 60) -> Turn:
        return Turn(access, LockTimes(ttl_s, wait_s), uniform=lambda: 0.0)

    return make


async def take(turn: Turn, locks: str, access: StoreAccess) -> set[str]:
    return await turn.take(list(locks), access.deadline())


async def test_each_lock_is_one_turns(turn: Callable[..., Turn], access: StoreAccess) -> None:
    """Of two that try the same locks, each lock is taken by one, and who has some doesn't need the others' to go on."""
    first, second = turn(), turn()
    assert await take(first, "ab", access) == {"a", "b"}
    assert await take(second, "bc", access) == {"c"}
    assert await take(first, "abc", access) == {"a", "b"}


async def test_a_freed_lock_can_be_taken(turn: Callable[..., Turn], access: StoreAccess) -> None:
    """Freeing gives the locks to whoever tries next."""
    first, second = turn(), turn()
    await take(first, "ab", access)
    await first.free(first.hand_over(["a"]))
    assert await take(second, "ab", access) == {"a"}
    assert first.hand_over() == ["b"]


async def test_a_lock_of_another_is_never_freed(turn: Callable[..., Turn], access: StoreAccess, store: Watched) -> None:
    """Who was so slow that its lock ended, and is another's now, leaves that one alone."""
    slow, next_one = turn(), turn()
    await take(slow, "a", access)
    store.now = 11.0
    assert await take(next_one, "a", access) == {"a"}
    await slow.free(slow.hand_over())
    assert await take(turn(), "a", access) == set()


async def test_a_killed_holders_lock_ends(turn: Callable[..., Turn], access: StoreAccess, store: Watched) -> None:
    """Nobody frees the lock of a replica that was killed; it can be taken after its life, and not before."""
    await take(turn(), "a", access)
    other = turn()
    store.now = 9.9
    assert await other.look(["entry"], ["a"]) == ([None], set())
    store.now = 10.0
    assert await other.look(["entry"], ["a"]) == ([None], {"a"})
    assert await take(other, "a", access) == {"a"}


async def test_a_look_has_entries_and_locks(turn: Callable[..., Turn], access: StoreAccess, store: Watched) -> None:
    """One read says which entries have come and which locks are free."""
    await take(turn(), "ab", access)
    await store.set_many({"A": b"rows"}, 60)
    trips = access._stats.store_round_trips
    assert await turn().look(["A", "B", "C"], ["a", "b", "c"]) == ([b"rows", None, None], {"c"})
    assert access._stats.store_round_trips == trips + 1


async def test_a_lost_answer_is_no_lock_lost(turn: Callable[..., Turn], access: StoreAccess, store: Watched) -> None:
    """A lock whose answer was lost, so that the command sent again found it taken, is recognised by its token."""
    store.lose_answers = True
    unsure = turn()
    assert await take(unsure, "a", access) == set()
    assert (await unsure.look(["A"], ["a"]))[1] == {"a"}
    assert await take(unsure, "a", access) == {"a"}


async def test_locks_of_a_failing_store_are_freed_too(
    turn: Callable[..., Turn], access: StoreAccess, store: Watched
) -> None:
    """Locks that may have been taken before the store failed count as ours, so that they are freed later."""
    store.error = StoreError("timeout", "late")
    unsure = turn()
    with pytest.raises(StoreError):
        await take(unsure, "ab", access)
    await unsure.free(["a"])  # fails, and is no error
    store.error = None
    await unsure.free(unsure.hand_over())
    assert await take(turn(), "ab", access) == {"a", "b"}


async def test_locks_live_as_long_as_the_work(
    turn: Callable[..., Turn], access: StoreAccess, store: Watched, until: Until
) -> None:
    """Work that takes longer than a lock's life extends it again and again, and no longer than it lasts."""
    holder = turn(ttl_s=0.03)
    await take(holder, "ab", access)
    async with holder.keeping():
        await until(lambda: len(store.touched) >= 5)
    assert all((sorted(keys), ttl_s) == (["a", "b"], 0.03) for keys, ttl_s in store.touched)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})  # nobody is left who could extend them


@pytest.mark.parametrize("error", [None, ValueError("encoder")])
async def test_a_store_that_fails_does_not_fail_the_work(
    turn: Callable[..., Turn], access: StoreAccess, store: Watched, error: Exception | None, until: Until
) -> None:
    """A lock that can't be extended is given up in silence; the work's own error is raised as it is."""
    holder = turn(ttl_s=0.003)
    await take(holder, "a", access)
    store.error = StoreError("connect", "gone")
    with pytest.raises(ValueError, match="encoder") if error is not None else contextlib.nullcontext():
        async with holder.keeping():
            await until(lambda: access._stats.store_errors["connect"] == 1)
            if error is not None:
                raise error


async def test_pauses_grow_up_to_a_bound(turn: Callable[..., Turn], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is twice the one before, with jitter, until the longest, and the wait ends at its bound."""
    loop, slept = asyncio.get_running_loop(), []
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    waiting = turn(wait_s=1)
    while await waiting.pause():
        pass
    assert slept[:6] == pytest.approx([0.005, 0.01, 0.02, 0.04, 0.08, LAST_PAUSE_S / 2])
    assert max(slept) <= LAST_PAUSE_S / 2  # the draw is 0: half of the pause
    assert sum(slept) == pytest.approx(1)


async def test_there_is_time_for_one_look(turn: Callable[..., Turn]) -> None:
    """Who was busy encoding its own part for longer than the bound still looks once at what the others have."""
    late = turn(wait_s=0)
    assert await late.pause()
    assert not await late.pause()
