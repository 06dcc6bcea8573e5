"""Work side by side on a CPU's cores.

A small model's operators are too short to be shared out: the threads of one wait for each other more than they compute.
So each thread computes whole sequences, on one core.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tokenalign.tokens import IntArray, offsets_of

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Multiply-adds of one pass from which on its operators are long enough to be shared out among threads.
SHARED_OPERATORS = 1e9
MIN_SHARD_TOKENS = 128  # a share of fewer costs more in overhead than a second core gives


def shards(lengths: IntArray, parts: int, min_tokens: int = MIN_SHARD_TOKENS) -> list[NDArray[np.intp]]:
    """Indices of sequences in at most `parts` runs of about as many tokens each, at least `min_tokens` and a sequence.

    lengths: `[sequences]`, at least one
    """
    ends = offsets_of(lengths)[1:]
    tokens = int(ends[-1])
    wanted = max(1, min(parts, tokens // min_tokens))
    bounds = np.searchsorted(ends, tokens * np.arange(1, wanted) / wanted, side="right")
    return [run for run in np.split(np.arange(len(lengths)), bounds) if len(run)]


def operator_threads_for(multiply_adds: float, threads: int) -> int:
    """How many of `threads` a pass of so many multiply-adds is best computed with when nothing else is."""
    return threads if multiply_adds >= SHARED_OPERATORS else 1


@contextmanager
def operator_threads(threads: int) -> Iterator[None]:
    """Within, operators that this thread calls compute on so many threads."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compute_alone() -> None:
    """Has this thread's operators compute on it alone, from now on."""
    torch.get_num_threads()  # at a thread's first question torch sets it to what was set last, wherever
    torch.set_num_threads(1)


class ComputePool:
    """Threads that compute one item each. Usable from several threads at once, not from within its own."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, "compute", initializer=compute_alone)
        self._lock = threading.Lock()
        self._started = False

    def map(self, call: Callable[[ItemT], ResultT], items: Sequence[ItemT], multiply_adds: float) -> list[ResultT]:
        """The results in order; the first error where there is one.

        multiply_adds: of all items, roughly. A single item is computed here, its operators shared out if it is large.
        """
        if len(items) == 1:
            with operator_threads(operator_threads_for(multiply_adds, self.threads)):
                return [call(items[0])]
        self._start()
        return list(self._executor.map(call, items))

    def _start(self) -> None:
        """All threads at once, so that what torch gives a thread made later can be set back to this thread's number."""
        with self._lock:
            if self._started:
                return
            ready = threading.Barrier(self.threads + 1)
            for _ in range(self.threads):
                self._executor.submit(ready.wait)
            ready.wait()
            torch.set_num_threads(torch.get_num_threads())
            self._started = True
