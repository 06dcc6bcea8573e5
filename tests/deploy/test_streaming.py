"""Results as they come: in their order of arrival, a few at a time, and nothing goes on for who has left."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deploy.batching import QueueFull
from deploy.streaming import as_they_come

Until = Callable[[Callable[[], bool]], Any]


class Work:
    """Items that are done when a test says so."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Future[str]] = {}
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.room = 10**9

    async def submit(self, item: str) -> str:
        self.submitted.append(item)
        if len(self.open) >= self.room:
            raise QueueFull(len(self.open), 0, self.room, 1, 7.0)
        self.open[item] = asyncio.get_running_loop().create_future()
        try:
            return await self.open[item]
        except asyncio.CancelledError:
            self.cancelled.append(item)
            raise
        finally:
            del self.open[item]

    def finish(self, *items: str) -> None:
        for item in items:
            self.open[item].set_result(item.upper())


@pytest.fixture
def work() -> Work:
    return Work()


async def test_in_the_order_of_arrival(work: Work, until: Until) -> None:
    """Each result comes with its item's number when it is there, whatever others still wait."""
    found = as_they_come("abc", work.submit, lambda: 9)
    first = asyncio.ensure_future(anext(found))
    await until(lambda: len(work.open) == 3)
    work.finish("b")
    assert await first == (1, "B")
    work.finish("c")
    assert await anext(found) == (2, "C")
    work.finish("a")
    assert [pair async for pair in found] == [(0, "A")]


async def test_nothing_to_do(work: Work) -> None:
    """No items, no results."""
    assert [pair async for pair in as_they_come("", work.submit, lambda: 9)] == []


async def test_only_some_at_a_time(work: Work, until: Until) -> None:
    """Items beyond the bound are submitted when a result was taken, not when it is there."""
    found = as_they_come("abcdef", work.submit, lambda: 2)
    first = asyncio.ensure_future(anext(found))
    await until(lambda: len(work.open) == 2)
    work.finish("a", "b")
    await first
    for _ in range(20):
        await asyncio.sleep(0)
    assert work.submitted == ["a", "b"]
    await anext(found)
    asked = asyncio.ensure_future(anext(found))
    await until(lambda: len(work.open) == 2)
    assert work.submitted == ["a", "b", "c", "d"]
    work.finish("d")
    assert await asked == (3, "D")
    await found.aclose()


async def test_an_error_ends_it(work: Work, until: Until) -> None:
    """What one item raises is raised, and the others are cancelled."""
    found = as_they_come("abc", work.submit, lambda: 9)
    first = asyncio.ensure_future(anext(found))
    await until(lambda: len(work.open) == 3)
    work.open["b"].set_exception(ValueError("bad"))
    with pytest.raises(ValueError, match="bad"):
        await first
    await until(lambda: not work.open)
    assert sorted(work.cancelled) == ["a", "c"]


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_who_leaves_leaves_nothing(work: Work, until: Until, how: str) -> None:
    """A close, or a cancellation of who waits, cancels what is under way and submits nothing more."""
    found = as_they_come("abcd", work.submit, lambda: 3)
    waiting = asyncio.ensure_future(anext(found))
    await until(lambda: len(work.open) == 3)
    if how == "close":
        work.finish("a")
        await waiting
        await found.aclose()
    else:
        waiting.cancel()
        await asyncio.wait({waiting})
    await until(lambda: not work.open)
    assert work.submitted == ["a", "b", "c"]


class TestFullQueue:
    async def test_at_the_beginning(self, work: Work) -> None:
        """Where there is room for none, the caller is told at once."""
        work.room = 0
        with pytest.raises(QueueFull):
            await anext(as_they_come("ab", work.submit, lambda: 9))

    async def test_room_for_some(self, work: Work, until: Until) -> None:
        """Where there is room for some, the others are submitted, in their order, as those have their results."""
        work.room = 1
        found = as_they_come("abc", work.submit, lambda: 9)
        for number, item in enumerate("abc"):
            asked = asyncio.ensure_future(anext(found))
            await until(lambda item=item: item in work.open)  # type: ignore[misc]  # mypy can't type the default
            work.finish(item)
            assert await asked == (number, item.upper())
        assert [pair async for pair in found] == []

    async def test_room_that_others_took(self, work: Work, until: Until) -> None:
        """Where others took all room in the meantime, it is tried again after the time that the queue names."""
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            work.room = 1

        found = as_they_come("ab", work.submit, lambda: 1, sleep)
        first = asyncio.ensure_future(anext(found))
        await until(lambda: "a" in work.open)
        work.finish("a")
        await first
        work.room = 0
        second = asyncio.ensure_future(anext(found))
        await until(lambda: "b" in work.open)
        assert slept == [7.0]
        work.finish("b")
        assert await second == (1, "B")
