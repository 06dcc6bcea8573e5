"""How much each caller may ask of one ingress: requests at a time, and requests a second."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenalign.errors import TokenAlignError


class QuotaError(TokenAlignError):
    """A caller asked for more than its share."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TokenBucket:
    """Lets `rate_per_s` through in the long run, and `burst` at once after a pause."""

    def __init__(self, rate_per_s: float, burst: int, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = float(burst)
        self._at = now

    def take(self, now: float) -> float:
        """0 when one goes through; else the seconds until one would, and nothing is taken."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate_per_s)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return 0.0
        return (1 - self._left) / self._rate_per_s


@dataclass(slots=True)
class _Use:
    bucket: TokenBucket | None
    in_progress: int = 0


class Quotas:
    """What each caller has in use, by name; None is no limit."""

    def __init__(
        self,
        max_concurrent: int | None,
        rate_per_s: float | None,
        burst: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """burst: None is the requests of a second"""
        self._max_concurrent = max_concurrent
        self._rate_per_s = rate_per_s
        self._burst = burst or max(1, math.ceil(rate_per_s or 1))
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def enter(self, name: str) -> None:
        """Begins a request, which must `leave`; `QuotaError` where it would be one too many, and has not begun."""
        use = self._uses.get(name) or self._uses.setdefault(name, self._new())
        if self._max_concurrent is not None and use.in_progress >= self._max_concurrent:
            raise QuotaError(
                f"key {name!r} has {use.in_progress} requests in progress here, at most {self._max_concurrent} allowed "
                "(access.max_concurrent_per_key); wait for one to be answered",
                1.0,
            )
        if use.bucket is not None and (wait_s := use.bucket.take(self._clock())) > 0:
            raise QuotaError(
                f"key {name!r} asks more than {self._rate_per_s:g} times a second (access.requests_per_s_per_key); "
                "send again after the time in Retry-After, or several texts in one request",
                wait_s,
            )
        use.in_progress += 1

    def leave(self, name: str) -> None:
        """Ends a request."""
        self._uses[name].in_progress -= 1

    def _new(self) -> _Use:
        rate = self._rate_per_s
        return _Use(None if rate is None else TokenBucket(rate, self._burst, self._clock()))
