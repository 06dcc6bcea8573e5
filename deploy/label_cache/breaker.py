"""A store that is not asked for a while after it failed again and again, so that callers don't wait for it in vain."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from deploy.label_cache.store import Store, StoreError, StoreReason
from deploy.label_cache.wrapper import StoreWrapper

ResultT = TypeVar("ResultT")

BreakerState = Literal["closed", "open", "half_open"]

# Everything else is an answer: a store that is full, read-only or refuses one command still serves the others, and says
# so at once.
_FAILURES: frozenset[StoreReason] = frozenset({"timeout", "connect", "auth", "loading", "cluster", "unexpected"})
_UNKNOWN: frozenset[StoreReason] = frozenset({"busy", "open"})
"""Of our own making: they say nothing about the store."""

logger = logging.getLogger(__name__)


class BreakerStore(StoreWrapper):
    """Passes calls on until `failures` in a row found no working store; then refuses for `open_s`, then tries with one.

    While it refuses, a call raises `StoreError` with reason "open" at once. The one that tries is any caller's; the
    others are refused until it is back. Its success ends the refusing, its failure begins the next `open_s`.

    state: "closed" (calls pass), "open" (they are refused), "half_open" (the next one, or one under way, decides)
    times_opened, refused: since the start
    """

    def __init__(
        self,
        store: Store,
        *,
        failures: int = 5,
        open_s: float = 5.0,
        call_timeout_s: float = 5.0,
        patience_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A breaker in front of `store`.

        call_timeout_s: of one call, with its attempts to connect and its retries; past it, reason "timeout"
        patience_s: a call that its caller gave up after that long counts as a failure, before that as nothing
        """
        if failures < 1:
            raise ValueError(f"failures is {failures}; a breaker opens after at least 1")
        for name, value in (("open_s", open_s), ("call_timeout_s", call_timeout_s), ("patience_s", patience_s)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        self.times_opened = 0
        self.refused = 0
        self._store = store
        self._threshold, self._open_s = failures, open_s
        self._call_timeout_s, self._patience_s = call_timeout_s, patience_s
        self._clock = clock
        self._failed_in_a_row = 0
        self._try_at: float | None = None
        self._trying = False
        # Grows whenever the state changes: a call that began before must not decide about what came after.
        self._epoch = 0

    @property
    def state(self) -> BreakerState:
        """As it is now; see the class."""
        if self._try_at is None:
            return "closed"
        return "open" if self._clock() < self._try_at else "half_open"

    async def close(self) -> None:
        """See `Store.close`; passed on in every state."""
        await self._store.close()

    async def _through(self, call: Callable[[Store], Awaitable[ResultT]]) -> ResultT:
        with self._counted():
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    return await call(self._store)
            except TimeoutError as error:
                raise StoreError("timeout", f"the store gave no answer within {self._call_timeout_s} s") from error

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Refuses while open; otherwise what happens within counts."""
        state = self.state
        if state == "open" or (state == "half_open" and self._trying):
            self.refused += 1
            raise StoreError("open", f"the store failed {self._threshold} times in a row and is not asked for a moment")
        self._trying = state == "half_open"
        epoch, began_at = self._epoch, self._clock()
        outcome: bool | None = None
        try:
            yield
            outcome = True
        except StoreError as error:
            if error.reason not in _UNKNOWN:
                outcome = error.reason not in _FAILURES
            raise
        except asyncio.CancelledError:
            # Deadlines of callers end calls this way, often long before the store's own timeouts would.
            if self._clock() - began_at >= self._patience_s:
                outcome = False
            raise
        finally:
            if epoch == self._epoch:
                self._decide(outcome)

    def _decide(self, works: bool | None) -> None:
        tried, self._trying = self._trying, False
        if works:
            self._failed_in_a_row = 0
            if tried:
                self._try_at = None
                self._epoch += 1
                logger.info("the label store answers again")
        elif works is False:
            self._failed_in_a_row += 1
            if tried or self._failed_in_a_row >= self._threshold:
                if not tried:
                    self.times_opened += 1
                    logger.warning(
                        "the label store failed %d times in a row; going on without it, tried again every %s s",
                        self._failed_in_a_row,
                        self._open_s,
                    )
                self._try_at = self._clock() + self._open_s
                self._epoch += 1
