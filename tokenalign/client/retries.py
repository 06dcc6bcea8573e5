"""When to ask again, how long to wait before it, and how much time is left."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from tokenalign.client.errors import NoAnswerError, OverloadedError, ServiceError, ServiceUnavailableError

Clock = Callable[[], float]


class Deadline:
    """Counts down from `timeout_s`; None never ends."""

    def __init__(self, timeout_s: float | None, clock: Clock) -> None:
        self._clock = clock
        self._ends = math.inf if timeout_s is None else clock() + timeout_s

    def left_s(self) -> float:
        """Seconds left, never below 0; infinity without a limit."""
        return max(0.0, self._ends - self._clock())

    def lift(self) -> None:
        """Ends the counting: there is no limit from now on."""
        self._ends = math.inf


class PhaseLimits(dict[str, float | None]):
    """httpx's time limits of one attempt, each shortened to what the deadline leaves when its phase begins.

    httpx looks a limit up at the start of connecting, of writing, of waiting for the answer and of reading it; limits
    that were fixed when the attempt began could add up to several times the time that was left.
    """

    def __init__(self, deadline: Deadline, connect_timeout_s: float, read_timeout_s: float) -> None:
        super().__init__(connect=connect_timeout_s, read=read_timeout_s, write=read_timeout_s, pool=read_timeout_s)
        self._deadline = deadline

    def get(self, key: str, default: float | None = None) -> float | None:  # type: ignore[override]
        """Seconds that the phase may take."""
        limit = super().get(key, default)
        left = self._deadline.left_s()
        if math.isinf(left):
            return limit
        # 0 would mean "don't block" to a socket, which fails otherwise than by a timeout.
        return max(left if limit is None else min(limit, left), 0.001)


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential backoff with full jitter, on top of what the service asks for in Retry-After.

    max_retries: attempts after the first
    first_wait_s, max_wait_s: the upper bound of the random wait before the first retry, doubled with each, up to
    jitter: gives a number in [0, 1)
    """

    max_retries: int
    first_wait_s: float = 0.25
    max_wait_s: float = 8.0
    jitter: Callable[[], float] = random.random

    def wait_s(self, failure: Exception, retry: int, deadline: Deadline) -> float:
        """Seconds to wait before retry number `retry` (from 0); raises `failure` where none is due.

        None is due when the failure would only come again, when there were enough, or when the wait would outlast the
        deadline: the caller then gets the failure itself now, rather than a timeout later.
        """
        if retry >= self.max_retries or not _passes(failure):
            raise failure
        asked = failure.retry_after_s if isinstance(failure, ServiceError) else None
        bound = min(self.max_wait_s, self.first_wait_s * 2.0 ** min(retry, 60))
        wait = (asked or 0.0) + self.jitter() * bound
        if wait >= deadline.left_s():
            raise failure
        return wait


def _passes(failure: Exception) -> bool:
    if isinstance(failure, ServiceUnavailableError):
        # The service says when to come again unless it has no store of label sets at all. Proxies often say nothing.
        return failure.retry_after_s is not None or failure.error_type != "label_sets_unavailable"
    return isinstance(failure, (OverloadedError, NoAnswerError))


def retry_after_s(value: str | None, date: str | None = None, now: Clock = time.time) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or as an HTTP date; None where it can't be read.

    date: the answer's Date header; a date is measured from it, so that a clock that is wrong here does not matter
    """
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.isdecimal() and len(value) <= 9:
        return float(value)
    until = _http_date(value)
    if until is None:
        return None
    since = _http_date(date)
    return max(0.0, until - (now() if since is None else since))


def _http_date(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        found: datetime = parsedate_to_datetime(value)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
