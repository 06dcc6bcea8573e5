"""Items of one caller through a batcher, each result as soon as it is there, and never many of them at a time."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from deploy.batching import QueueFull

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

Submit = Callable[[ItemT], Awaitable[ResultT]]


async def as_they_come(
    items: Sequence[ItemT],
    submit: Submit[ItemT, ResultT],
    ahead: Callable[[], int],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[tuple[int, ResultT], None]:
    """Pairs of an item's number and its result, in the order in which results come.

    submit: gives one item's result; what it raises ends the iteration, with what waits cancelled, as a close does
    ahead: how many items may wait, be in work or have a result that nobody took yet
    An item for which the queue has no room is submitted again when another has its result, or after the time that
    `QueueFull` names where none is under way. Before the first result `QueueFull` is raised instead.
    """
    left, started = deque(range(len(items))), False
    under_way: dict[asyncio.Task[ResultT], int] = {}
    try:
        while left or under_way:
            while left and len(under_way) < max(1, ahead()):
                number = left.popleft()
                task = asyncio.ensure_future(_run(submit, items[number]))
                task.add_done_callback(_noticed)
                under_way[task] = number
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            full: QueueFull | None = None
            for task in sorted(done, key=under_way.__getitem__, reverse=True):
                if isinstance(error := task.exception(), QueueFull):
                    left.appendleft(under_way.pop(task))
                    full = error
            for task in done & under_way.keys():
                number = under_way.pop(task)
                yield number, task.result()
                started = True
            if full is None:
                continue
            if under_way:
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            elif started:
                await sleep(full.retry_after_s)
            else:
                raise full
    finally:
        for task in under_way:
            task.cancel()


async def _run(submit: Submit[ItemT, ResultT], item: ItemT) -> ResultT:
    return await submit(item)


def _noticed(task: "asyncio.Task[ResultT]") -> None:
    """Asks for the error of a task that nobody may ask any more."""
    if not task.cancelled():
        task.exception()
