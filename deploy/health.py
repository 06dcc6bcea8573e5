"""What makes a replica worth replacing: a pass that never ends, or passes that fail one after the other.

Serve asks `check_health` of every replica, and puts another in the place of one that failed it three times in a row.
"""

import itertools
import time
from collections.abc import Callable
from typing import TypeVar

from deploy.workers import PriorityWorker
from tokenalign.errors import TokenAlignError

ResultT = TypeVar("ResultT")

CHECK_PERIOD_S = 2.0  # Serve's own is 10 s, and three failures in a row then take half a minute
CHECK_TIMEOUT_S = 5.0  # no answer for so long counts as a failure; event loops do nothing that takes a second
MAX_FAILED_PASSES = 8
"""Passes in a row that ended with an error not of ours. A GPU whose context is lost fails every pass from then on."""


class UnhealthyError(TokenAlignError):
    """This replica can't do its work any more; Serve is to start another in its place."""


class WatchedWorker(PriorityWorker):
    """Computing threads whose calls are watched: `check` says whether they still get anywhere."""

    def __init__(
        self,
        name: str,
        threads: int = 1,
        prepare: Callable[[], None] | None = None,
        *,
        max_pass_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_pass_s: a call that takes longer is taken for one that never ends; clock: gives seconds."""
        super().__init__(name, threads, prepare)
        self._name = name
        self._max_pass_s = max_pass_s
        self._clock = clock
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}  # of the calls that threads are at; each thread writes its own
        self._failed_in_a_row = 0
        self._busy_s = 0.0

    async def run(self, call: Callable[[], ResultT], priority: int = 0) -> ResultT:
        """See `PriorityWorker.run`. The time that a call waits for its turn doesn't count."""

        def watched() -> ResultT:
            number = next(self._numbers)
            self._since[number] = self._clock()
            try:
                result = call()
            except TokenAlignError:
                self._failed_in_a_row = 0  # it says what is wrong with the input, so the thread works
                raise
            except Exception:
                self._failed_in_a_row += 1
                raise
            finally:
                self._busy_s += self._clock() - self._since.pop(number)
            self._failed_in_a_row = 0
            return result

        return await super().run(watched, priority)

    def busy_s(self) -> float:
        """Seconds that calls have taken so far, those of several threads added up, calls under way included."""
        now = self._clock()
        return self._busy_s + sum(now - since for since in list(self._since.values()))

    def check(self) -> None:
        """Raises `UnhealthyError` where a call takes longer than `max_pass_s`, or the latest ones all failed."""
        oldest = min(list(self._since.values()), default=None)
        if oldest is not None and (taken_s := self._clock() - oldest) > self._max_pass_s:
            raise UnhealthyError(
                f"a pass of the {self._name} takes {taken_s:.0f} s so far, more than health.max_pass_s="
                f"{self._max_pass_s:g}; this replica is to be replaced. Raise the setting if passes take so long here"
            )
        if self._failed_in_a_row >= MAX_FAILED_PASSES:
            raise UnhealthyError(
                f"the latest {self._failed_in_a_row} passes of the {self._name} failed (their errors were logged); "
                "this replica is to be replaced"
            )


class BusyShare:
    """How much of the time a worker of one thread computes, from one question to the next: 0 to 1."""

    def __init__(self, worker: WatchedWorker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._clock = clock
        self._asked_at, self._busy_then_s = clock(), worker.busy_s()

    def since_last(self) -> float:
        """The share since the last question; 0.0 where no time has passed."""
        now, busy_s = self._clock(), self._worker.busy_s()
        passed_s, worked_s = now - self._asked_at, busy_s - self._busy_then_s
        self._asked_at, self._busy_then_s = now, busy_s
        return min(1.0, max(0.0, worked_s / passed_s)) if passed_s > 0 else 0.0
