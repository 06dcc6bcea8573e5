"""The computing thread: in order of priority, one call at a time, and it outlives whatever a call does."""

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from deploy.workers import PriorityWorker, give_way

Until = Callable[[Callable[[], bool]], Any]


@pytest.fixture
def worker() -> Iterator[PriorityWorker]:
    """A worker, ended afterwards."""
    made = PriorityWorker("tested")
    yield made
    made.stop()


class Gate:
    """A call that holds the thread until the test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.opened.wait(60), "nobody opened the gate"
        return "passed"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the process's")
async def test_a_thread_that_gives_way() -> None:
    """Only the computing thread becomes nicer: the loop beside it stays as it is."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    made = PriorityWorker("nice", prepare=partial(give_way, 1))
    try:
        assert await made.run(lambda: os.getpriority(os.PRIO_PROCESS, 0)) == min(before + 1, 19)
    finally:
        made.stop()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


async def test_what_the_call_gives(worker: PriorityWorker) -> None:
    """A call's result comes back, and it ran on the worker's own thread."""
    assert await worker.run(lambda: threading.current_thread().name) == "tested"


@pytest.mark.parametrize(
    "error", [ValueError("a"), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(3), TimeoutError("t")]
)
async def test_what_the_call_raises(worker: PriorityWorker, error: BaseException) -> None:
    """The waiter gets what its call raised, and the thread lives on for the next."""

    def fail() -> None:
        raise error

    with pytest.raises((type(error), RuntimeError)) as caught:
        await worker.run(fail)
    # asyncio makes a TimeoutError anew, and takes no StopIteration.
    assert type(caught.value) is type(error) or caught.value.__cause__ is error
    assert await worker.run(lambda: 1) == 1


async def test_the_loop_stays_free(worker: PriorityWorker, until: Until) -> None:
    """While a call is under way the event loop runs, and can let it end."""
    gate = Gate()
    call = asyncio.create_task(worker.run(gate))
    await until(gate.entered.is_set)
    assert not call.done()
    gate.opened.set()
    assert await call == "passed"


async def test_the_lowest_number_goes_first(worker: PriorityWorker, until: Until) -> None:
    """Waiting calls run by priority, and in their order of arrival within one."""
    gate = Gate()
    order: list[str] = []
    calls: list[asyncio.Task[Any]] = [asyncio.create_task(worker.run(gate))]
    await until(gate.entered.is_set)
    for name, priority in [("b1", 1), ("a1", 0), ("b2", 1), ("a2", 0), ("c", 2)]:
        calls.append(asyncio.create_task(worker.run(partial(order.append, name), priority)))
    await until(lambda: worker.waiting == 5)
    gate.opened.set()
    await asyncio.gather(*calls)
    assert order == ["a1", "a2", "b1", "b2", "c"]


async def test_who_left_is_not_computed_for(worker: PriorityWorker, until: Until) -> None:
    """A call whose waiter was cancelled before its turn is skipped; the ones behind it run."""
    gate, ran = Gate(), []
    first = asyncio.create_task(worker.run(gate))
    await until(gate.entered.is_set)
    gone = asyncio.create_task(worker.run(lambda: ran.append("gone")))
    stays = asyncio.create_task(worker.run(lambda: ran.append("stays")))
    await until(lambda: worker.waiting == 2)
    gone.cancel()
    await until(gone.done)
    gate.opened.set()
    await asyncio.gather(first, stays)
    assert ran == ["stays"]


async def test_who_leaves_during_its_call(worker: PriorityWorker, until: Until) -> None:
    """A waiter that is cancelled while its call runs ends at once; the call ends by itself, and the thread goes on."""
    gate = Gate()
    call = asyncio.create_task(worker.run(gate))
    await until(gate.entered.is_set)
    call.cancel()
    await until(call.done)
    gate.opened.set()
    assert await worker.run(lambda: 1) == 1


class Array:
    """Something large that a call or its result holds."""


@pytest.mark.parametrize("end", ["result", "error", "cancelled"])
async def test_an_idle_thread_holds_nothing(worker: PriorityWorker, until: Until, end: str) -> None:
    """Once a call is over, or was skipped, the waiting thread keeps neither it nor what it gave alive."""
    array = Array()
    kept = weakref.ref(array)

    def call(array: Array = array) -> Array:
        if end == "error":
            raise ValueError(array)
        return array

    gate = Gate()
    blocked = asyncio.create_task(worker.run(gate))
    await until(gate.entered.is_set)
    waiter = asyncio.create_task(worker.run(call))
    await until(lambda: worker.waiting == 1)
    if end == "cancelled":
        waiter.cancel()
        await until(waiter.done)
    gate.opened.set()
    await asyncio.gather(blocked, waiter, return_exceptions=True)
    del array, call, waiter

    def gone() -> bool:
        gc.collect()
        return kept() is None

    await until(gone)


async def test_stop_lets_the_waiting_finish(until: Until) -> None:
    """After `stop` the calls that wait already are done, then the thread ends."""
    worker, gate = PriorityWorker("to be stopped"), Gate()
    calls = [asyncio.create_task(worker.run(gate))]
    await until(gate.entered.is_set)
    calls += [asyncio.create_task(worker.run(lambda: "late", priority)) for priority in (5, 0)]
    await until(lambda: worker.waiting == 2)
    worker.stop()
    gate.opened.set()
    assert await asyncio.gather(*calls) == ["passed", "late", "late"]
    await until(lambda: "to be stopped" not in {thread.name for thread in threading.enumerate()})


async def test_several_threads() -> None:
    """As many calls run at once as there are threads, each prepared once; idle ones are counted."""
    meet, prepared = threading.Barrier(3), []
    worker = PriorityWorker("of three", 3, lambda: prepared.append(threading.get_ident()))
    assert worker.idle == 3
    running = [asyncio.create_task(worker.run(lambda: meet.wait(60) and None)) for _ in range(2)]
    while worker.idle != 1:  # noqa: ASYNC110  the tasks' own first steps
        await asyncio.sleep(0)
    await asyncio.gather(*running, worker.run(lambda: meet.wait(60) and None))
    assert worker.idle == 3
    assert len(set(prepared)) == len(prepared) == 3
    worker.stop()
