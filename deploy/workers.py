"""Computing threads beside an event loop: forward passes never run on the loop itself."""

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_STOP_PRIORITY = 1_000_000


def available_cores() -> int:
    """Cores that this process may run on. Asked of the system: Ray tells torch the replica's `num_cpus` instead."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def give_way(niceness: int) -> None:
    """Lets this thread compute where threads of less niceness leave a core to it; on Linux, where a thread has its own.

    What accepts and refuses requests and passes batches on needs little time, but needs it at once.
    """
    if sys.platform == "linux":
        os.nice(niceness)


class PriorityWorker:
    """Threads that run calls, the lowest priority number first, first come first within it.

    A call whose waiter was cancelled before its turn is skipped.
    """

    def __init__(self, name: str, threads: int = 1, prepare: Callable[[], None] | None = None) -> None:
        """prepare: is called in each thread before its first call."""
        self._queue: PriorityQueue[tuple[int, int, Future[Any] | None, Callable[[], Any] | None]] = PriorityQueue()
        self._counter = itertools.count()
        self._prepare = prepare
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]
        self._in_hand = 0
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """How many calls wait for their turn."""
        return self._queue.qsize()

    @property
    def idle(self) -> int:
        """How many threads have nothing to do."""
        return max(0, len(self._threads) - self._in_hand)

    async def run(self, call: Callable[[], ResultT], priority: int = 0) -> ResultT:
        """What `call` returns or raises, once its turn came; the loop stays free meanwhile."""
        future: Future[ResultT] = Future()
        self._queue.put((priority, next(self._counter), future, call))
        self._in_hand += 1
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._in_hand -= 1

    def stop(self) -> None:
        """Let the threads end after the calls that wait already."""
        for _ in self._threads:
            self._queue.put((_STOP_PRIORITY, next(self._counter), None, None))

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Whether to go on. A function of its own, so that the waiting thread holds nothing of its last call."""
        _, _, future, call = self._queue.get()
        if future is None or call is None:
            return False
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  the waiter gets it; the thread must live on
                future.set_exception(_awaitable(error))
        return True


def _awaitable(error: BaseException) -> BaseException:
    """The error, or one that has it as cause: asyncio refuses a StopIteration, and the waiter would never wake."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError("the call ended with StopIteration")
    wrapped.__cause__ = error
    return wrapped
