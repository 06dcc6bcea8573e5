"""How long a batch is waited for, so that a replica that vanished without a word holds nothing up.

A replica whose process ends is known at once: its connections end. One whose machine is gone, or that hangs, looks like
one that is slow, until Serve's health checks find it.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from deploy.wire import ReplicaLostError

ResultT = TypeVar("ResultT")

UNUSUAL_S = 2.0
UNUSUAL = 4.0  # times the longest of late
RECENT = 64  # attempts


class Attempts:
    """Counts the attempts under way that take unusually long, and ends those that take too long.

    time_limit_s: after which nobody waits for an answer any more
    """

    def __init__(self, time_limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._time_limit_s = time_limit_s
        self._clock = clock
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def overdue(self) -> int:
        """How many attempts take longer than 2 s, and than four times the longest of late."""
        unusual_s = max(UNUSUAL_S, UNUSUAL * max(self._recent, default=float("inf")))
        return sum(self._clock() - since > unusual_s for since in self._since.values())

    async def first(self, attempt: Awaitable[ResultT]) -> ResultT:
        """What the attempt gives, within half of the time limit, so that a second one has a chance.

        Where attempts took long of late it is four times the longest of them. Raises `ReplicaLostError` after that.
        """
        return await self._within(max(self._time_limit_s / 2, UNUSUAL * max(self._recent, default=0.0)), attempt)

    async def second(self, attempt: Awaitable[ResultT]) -> ResultT:
        """What the attempt gives, within the time limit; `ReplicaLostError` after that."""
        return await self._within(self._time_limit_s, attempt)

    async def _within(self, limit_s: float, attempt: Awaitable[ResultT]) -> ResultT:
        number, started = next(self._numbers), self._clock()
        self._since[number] = started
        try:
            async with asyncio.timeout(limit_s) as limit:
                result = await attempt
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ReplicaLostError(f"no answer from a scorer within {limit_s:g} s; it is taken for lost") from error
        finally:
            del self._since[number]
        self._recent.append(self._clock() - started)
        return result
