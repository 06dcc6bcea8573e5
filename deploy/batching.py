"""Continuous micro-batching on one event loop: many callers' items become few batches.

    submit -> _Queue, bounded -> as soon as a slot is free: _Batch -> dispatch -> every caller's own results

A batch is formed when it can leave, not before: under load batches grow by themselves, without load nothing waits.
"""

import asyncio
import contextvars
import logging
import math
import operator
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MIN_RETRY_AFTER_S = 0.1

logger = logging.getLogger(__name__)


class BatcherError(Exception):
    """Base of this module's errors; any other error of `submit` came out of dispatch, weight or identity."""


@dataclass(eq=False)
class QueueFull(BatcherError):  # noqa: N818 - asyncio's word for it
    """Nothing of the request was queued; it may be sent again after about `retry_after_s`.

    wait_s: how long a request would wait now, at the pace of late; None where room is what is lacking
    """

    queued_items: int
    queued_tokens: int
    max_queue_items: int
    max_queue_tokens: int
    retry_after_s: float
    wait_s: float | None = None
    max_wait_s: float | None = None

    def __str__(self) -> str:
        if self.wait_s is not None:
            return (
                f"the queue is too slow: {self.queued_items} items wait, which takes about {self.wait_s:.1f} s "
                f"(max_wait_s={self.max_wait_s}); send again in {self.retry_after_s:.1f} s"
            )
        return (
            f"no room in the queue: it holds {self.queued_items} items (max_queue_items={self.max_queue_items}) and "
            f"{self.queued_tokens} tokens (max_queue_tokens={self.max_queue_tokens}); "
            f"send again in {self.retry_after_s:.1f} s"
        )


class OversizedRequestError(BatcherError):
    """The request would not fit into an empty queue either: it has to be sent in parts."""


class DeadlineExceeded(BatcherError):  # noqa: N818 - gRPC's word for it
    """The deadline passed, in the queue or in flight; a result that still comes is dropped."""


class BatcherClosed(BatcherError):  # noqa: N818 - a state, like the others
    """The batcher takes no more requests, or gave this one up when it was closed."""


class DispatchError(BatcherError):
    """Dispatch gave a wrong number of results, or an error that can't be handed to a caller as it is."""


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What dispatch is told besides its items.

    `queued_items` and `queued_tokens` were left waiting when the batch was taken; an autoscaler that counts calls in
    flight can't see them. `rows[i]` numbers the distinct identity of item i in order of first appearance, so
    max(rows) + 1 rows have to be computed; they hold `tokens`, and `padded_tokens` once padded to the longest.
    The oldest item waited `waited_s`.
    """

    queued_items: int
    queued_tokens: int
    rows: tuple[int, ...]
    tokens: int
    padded_tokens: int
    waited_s: float


class _Request(Generic[ResultT]):
    """One caller: its future, and the results so far. `numbers` are its items' places in the order of arrival."""

    def __init__(self, numbers: range, deadline_s: float | None, now: float) -> None:
        self.numbers = numbers
        self.since = now
        self.future: asyncio.Future[list[ResultT]] = asyncio.get_running_loop().create_future()
        self._deadline_s = deadline_s
        self._expires_at = float("inf") if deadline_s is None else now + deadline_s
        self._results: dict[int, ResultT] = {}

    def live(self, now: float) -> bool:
        """Whether somebody still waits; past its deadline the request fails here."""
        if self._expires_at <= now:
            self.expire()
        return not self.future.done()

    def deliver(self, number: int, result: ResultT) -> None:
        if self.future.done():  # cancelled, expired or failed: setting a result would raise, and strand the others
            return
        self._results[number] = result
        if len(self._results) == len(self.numbers):
            self.future.set_result([self._results[number] for number in self.numbers])

    def fail(self, error: BaseException) -> None:
        if self.future.done():
            return
        if not isinstance(error, Exception) or isinstance(error, StopIteration):
            # A future refuses StopIteration, and a CancelledError would look like the caller's own cancellation.
            cause, error = error, DispatchError(f"dispatch ended with {error!r}; see its cause")
            error.__cause__ = cause
        self.future.set_exception(error)
        self.future.exception()  # marks it as retrieved: the caller may be gone before it looks

    def expire(self) -> None:
        self.fail(DeadlineExceeded(f"no result within deadline_s={self._deadline_s}; allow more, or send fewer items"))


@dataclass(slots=True, eq=False)
class _Entry(Generic[ItemT, ResultT]):
    """One item, waiting or in flight."""

    number: int
    item: ItemT
    weight: int
    identity: Hashable
    request: _Request[ResultT]


class _Batch(Generic[ItemT, ResultT]):
    """The entries of one dispatch. It costs rows x longest row, what a padded forward pass computes, or its tokens."""

    def __init__(self, oldest: _Entry[ItemT, ResultT], max_tokens: int, max_padding_share: float) -> None:
        self.entries = [oldest]  # the oldest always goes, however heavy it is
        self.rows = [0]  # of each entry
        self.tokens = self._longest = oldest.weight
        self._row_of: dict[Hashable, int] = {oldest.identity: 0}
        self._max_tokens = max_tokens
        self._max_padding_share = max_padding_share

    @property
    def padded_tokens(self) -> int:
        return len(self._row_of) * self._longest

    def add_if_it_fits(self, entry: _Entry[ItemT, ResultT]) -> None:
        known = entry.identity in self._row_of
        tokens = self.tokens + (0 if known else entry.weight)
        longest = max(self._longest, entry.weight)
        padded = tokens if self._max_padding_share == 1 else (len(self._row_of) + (not known)) * longest
        if padded > self._max_tokens or padded - tokens > self._max_padding_share * padded:
            return
        self.entries.append(entry)
        self.rows.append(self._row_of.setdefault(entry.identity, len(self._row_of)))
        self.tokens, self._longest = tokens, longest


class _Queue(Generic[ItemT, ResultT]):
    """What waits, in order of arrival, and the choice of what goes next: one sort of the queue for a batch."""

    def __init__(self, max_batch_tokens: int, max_padding_share: float, max_age_s: float) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_padding_share = max_padding_share
        self._max_age_s = max_age_s
        self._entries: dict[int, _Entry[ItemT, ResultT]] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: _Entry[ItemT, ResultT]) -> None:
        self._entries[entry.number] = entry
        self.tokens += entry.weight

    def oldest_since(self) -> float:
        """When the oldest item came; there must be one."""
        return next(iter(self._entries.values())).request.since

    def discard(self, numbers: Iterable[int]) -> None:
        """Takes out those of the numbers that still wait."""
        for number in numbers:
            if (entry := self._entries.pop(number, None)) is not None:
                self.tokens -= entry.weight

    def take(self, now: float, max_items: int) -> _Batch[ItemT, ResultT] | None:
        """The next batch, no longer waiting, or None where nobody waits: the oldest item and what fits it best.

        That is the nearest in length, overdue items before others, so that little is padding and none waits for ever.
        """
        waiting = [entry for entry in self._entries.values() if entry.request.live(now)]
        if not waiting:
            return None
        oldest, *others = waiting  # by age, so the overdue come first
        overdue = bisect_right(others, now - self._max_age_s, key=lambda entry: entry.request.since)

        def length_gap(entry: _Entry[ItemT, ResultT]) -> int:
            return abs(entry.weight - oldest.weight)

        batch = _Batch(oldest, self._max_batch_tokens, self._max_padding_share)
        for entry in sorted(others[:overdue], key=length_gap) + sorted(others[overdue:], key=length_gap):
            if len(batch.entries) == max_items:
                break
            batch.add_if_it_fits(entry)
        self.discard(entry.number for entry in batch.entries)
        return batch


class _Pace:
    """Seconds per token of recent batches, the last ten weighing most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def known(self) -> bool:
        return self._tokens > 0

    def record(self, tokens: int, seconds: float) -> None:
        self._tokens = 0.9 * self._tokens + tokens
        self._seconds = 0.9 * self._seconds + seconds

    def seconds_for(self, tokens: int, in_flight: int) -> float:
        """How long so many tokens take at this pace, at most 60 s; 1 s before there is a pace."""
        if not self.known:
            return 1.0
        return min(60.0, tokens * self._seconds / self._tokens / max(1, in_flight))


class MicroBatcher(Generic[ItemT, ResultT]):
    """Gives every submitted item its result, computed in batches that leave whenever a slot is free.

    dispatch           computes a batch: one result or one exception per item, in order
    weight             tokens of an item
    identity           equal identities cost their tokens once in a batch; dispatch still gets every item
    max_batch_tokens   of a batch when padded; an item that has more by itself goes alone
    max_batch_items    of a batch, equal ones counted
    max_queue_items    and max_queue_tokens: what may wait before `submit` raises QueueFull
    min_share_items    what waits is spread over the free slots, in batches of at least so many items, so that one batch
                       is computed while another is on its way; None fills one batch after the other
    linger_s           items that are fewer than the batches in flight have wait so long for company: they would take a
                       slot, and only wait elsewhere
    slots              how many batches may be in flight, asked before each take; may be 0 for a while
    max_age_s          items that waited longer go before items that are nearer to the oldest one's length
    max_padding_share  of a padded batch; 1.0 where the encoder doesn't pad, and a batch is what its tokens are
    slot_poll_s        how often slots are asked for while items wait; `notify` does it at once
    clock              seconds, for ages, deadlines and the pace

    All of it belongs to one event loop. The first `submit` starts the serving task, `close` ends it.
    """

    def __init__(
        self,
        dispatch: Callable[[Sequence[ItemT], BatchInfo], Awaitable[Sequence[ResultT | BaseException]]],
        *,
        weight: Callable[[ItemT], int],
        identity: Callable[[ItemT], Hashable],
        max_batch_tokens: int,
        max_batch_items: int,
        max_queue_items: int,
        max_queue_tokens: int,
        slots: Callable[[], int],
        min_share_items: int | None = None,
        linger_s: float = 0.0,
        max_age_s: float = 1.0,
        max_padding_share: float = 0.5,
        slot_poll_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(max_batch_tokens, max_batch_items, max_queue_items, max_queue_tokens) < 1:
            raise ValueError(
                f"{max_batch_tokens=}, {max_batch_items=}, {max_queue_items=}, {max_queue_tokens=} must be at least 1"
            )
        if max_age_s < 0 or slot_poll_s <= 0 or not 0 <= max_padding_share <= 1:
            raise ValueError(
                f"{max_age_s=} must be at least 0, {slot_poll_s=} more than 0, {max_padding_share=} within 0..1"
            )
        self._dispatch = dispatch
        self._weight = weight
        self._identity = identity
        self._max_batch_items = max_batch_items
        self._max_queue_items = max_queue_items
        self._max_queue_tokens = max_queue_tokens
        self._slots = slots
        self._slot_poll_s = slot_poll_s
        self._clock = clock
        self._queue: _Queue[ItemT, ResultT] = _Queue(max_batch_tokens, max_padding_share, max_age_s)
        self._pace = _Pace()
        self._linger_s = linger_s
        self._min_share_items = max_batch_items if min_share_items is None else min_share_items
        self._items_in_flight = 0
        self._lingering: asyncio.TimerHandle | None = None
        self._next_number = 0
        self._requests: set[_Request[ResultT]] = set()
        self._sends: set[asyncio.Task[None]] = set()
        self._server: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._stuck = False

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: `close` was called, or serving has ended by itself."""
        return self._closed

    @property
    def queued_items(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        return self._queue.tokens

    @property
    def in_flight(self) -> int:
        """Batches that were sent and have not come back."""
        return len(self._sends)

    def check_room(self, items: int, tokens: int = 0) -> None:
        """Raises what `submit` would raise at once for so much; without `tokens`, before they are counted."""
        if items > self._max_queue_items or tokens > self._max_queue_tokens:
            raise OversizedRequestError(
                f"a request of {items} items and {tokens} tokens exceeds max_queue_items={self._max_queue_items} or "
                f"max_queue_tokens={self._max_queue_tokens}; send it in parts"
            )
        if self.queued_items + items > self._max_queue_items or self.queued_tokens + tokens > self._max_queue_tokens:
            raise self._refusal()

    def check_wait(self, max_wait_s: float) -> None:
        """Raises `QueueFull` where what waits will take longer than `max_wait_s`, at the pace of late."""
        if self._pace.known and (wait_s := self._wait_s()) > max_wait_s:
            refusal = self._refusal()
            refusal.wait_s, refusal.max_wait_s = wait_s, max_wait_s
            raise refusal

    def _wait_s(self) -> float:
        return self._pace.seconds_for(self.queued_tokens, self.in_flight)

    def _refusal(self) -> QueueFull:
        return QueueFull(
            self.queued_items,
            self.queued_tokens,
            self._max_queue_items,
            self._max_queue_tokens,
            max(self._wait_s(), MIN_RETRY_AFTER_S),
        )

    def notify(self) -> None:
        """Asks for the slots again now, for an owner who knows that they changed."""
        self._wake.set()

    async def submit(self, items: Sequence[ItemT], *, deadline_s: float | None) -> list[ResultT]:
        """One result per item, in order, within `deadline_s` from now (None: whenever they come).

        Raises QueueFull or OversizedRequestError at once, with nothing queued; DeadlineExceeded; BatcherClosed; and the
        first error that dispatch gave for one of the items or for a batch that held one. However it ends, nothing of
        the request waits on.
        """
        if self._closed:
            raise BatcherClosed("the batcher is closed; send the request to another replica")
        if not items:
            return []
        priced = [self._price(item) for item in items]
        self.check_room(len(priced), sum(weight for _, weight, _ in priced))
        now = self._clock()
        request: _Request[ResultT] = _Request(
            range(self._next_number, self._next_number + len(priced)), deadline_s, now
        )
        self._next_number = request.numbers.stop
        for number, (item, weight, identity) in zip(request.numbers, priced, strict=True):
            self._queue.put(_Entry(number, item, weight, identity, request))
        return await self._outcome(request, deadline_s)

    async def close(self, *, drain: bool = False) -> None:
        """Ends serving, with no task left: what is queued or in flight fails with BatcherClosed and is cancelled.

        With `drain` it first waits until everything that was accepted is served, which takes slots: put a time limit
        around it. A drain that is cancelled ends like a close without one.
        """
        self._closed = True
        self.notify()
        try:
            if drain and self._server is not None:
                await asyncio.wait({self._server})
        finally:
            self._abandon()
            tasks = self._sends if self._server is None else self._sends | {self._server}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _price(self, item: ItemT) -> tuple[ItemT, int, Hashable]:
        """The item with its weight and identity: what is wrong with them fails here, before anything is queued."""
        weight, identity = operator.index(self._weight(item)), self._identity(item)
        if weight < 0:
            raise ValueError(f"an item has weight={weight}; it must be at least 0 tokens")
        hash(identity)
        return item, weight, identity

    async def _outcome(self, request: _Request[ResultT], deadline_s: float | None) -> list[ResultT]:
        """The queued request's results; it leaves nothing behind, however it ends."""
        loop = asyncio.get_running_loop()
        if self._server is None:
            # An empty context: the first caller's cancellation scope and request id must not reach later batches.
            self._server = loop.create_task(self._serve(), context=contextvars.Context())
        timer = None if deadline_s is None else loop.call_later(deadline_s, request.expire)
        self._requests.add(request)
        self.notify()
        try:
            return await request.future
        finally:
            if timer is not None:
                timer.cancel()
            self._requests.discard(request)
            self._queue.discard(request.numbers)

    async def _serve(self) -> None:
        try:
            while self._queue or self._sends or not self._closed:
                await self._woken()
                self._fill_slots()
        finally:  # also where a stopping event loop cancels it
            self._closed = True
            self._abandon()

    async def _woken(self) -> None:
        """Returns at a submit, when a batch is back or at `notify`; while items wait, within slot_poll_s."""
        poll = asyncio.get_running_loop().call_later(self._slot_poll_s, self._wake.set) if self._queue else None
        try:
            await self._wake.wait()
        finally:
            if poll is not None:
                poll.cancel()
        self._wake.clear()

    def _fill_slots(self) -> None:
        try:
            while self._queue and (free := self._slots() - self.in_flight) > 0:
                if self._lingers() or not self._send_next(free):
                    break
            self._stuck = False
        except Exception:
            if not self._stuck:  # said once, not at every poll
                logger.exception("no batch could be taken; trying again every slot_poll_s=%s", self._slot_poll_s)
            self._stuck = True

    def _lingers(self) -> bool:
        """Whether what waits had better wait for company: batches keep the encoder busy, and it is less than they."""
        if not self._sends or self.queued_items >= min(self._items_in_flight / self.in_flight, self._max_batch_items):
            return False
        left_s = self._queue.oldest_since() + self._linger_s - self._clock()
        if left_s <= 0:
            return False
        if self._lingering is not None:
            self._lingering.cancel()
        self._lingering = asyncio.get_running_loop().call_later(left_s, self._wake.set)
        return True

    def _send_next(self, free: int) -> bool:
        """Whether there was a batch to send: an even share of what waits for each of the `free` slots."""
        now = self._clock()
        share = max(self._min_share_items, math.ceil(self.queued_items / free))
        if (batch := self._queue.take(now, min(self._max_batch_items, share))) is None:
            return False
        self._items_in_flight += len(batch.entries)
        info = BatchInfo(
            queued_items=self.queued_items,
            queued_tokens=self.queued_tokens,
            rows=tuple(batch.rows),
            tokens=batch.tokens,
            padded_tokens=batch.padded_tokens,
            waited_s=now - batch.entries[0].request.since,
        )
        send = asyncio.get_running_loop().create_task(self._send(batch, info), context=contextvars.Context())
        self._sends.add(send)
        send.add_done_callback(lambda send: self._sent(send, len(batch.entries)))
        return True

    async def _send(self, batch: _Batch[ItemT, ResultT], info: BatchInfo) -> None:
        items = [entry.item for entry in batch.entries]
        started = self._clock()
        try:
            outcomes = _one_per_item(await self._dispatch(items, info), len(items))
        except BaseException as error:
            self._settle(batch, [error] * len(items))
            if not isinstance(error, Exception):
                raise
        else:
            self._pace.record(sum(entry.weight for entry in batch.entries), self._clock() - started)
            self._settle(batch, outcomes)

    def _settle(self, batch: _Batch[ItemT, ResultT], outcomes: Sequence[ResultT | BaseException]) -> None:
        for entry, outcome in zip(batch.entries, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                entry.request.fail(outcome)
            else:
                entry.request.deliver(entry.number, outcome)

    def _sent(self, send: asyncio.Task[None], items: int) -> None:
        self._sends.discard(send)
        self._items_in_flight -= items
        self.notify()

    def _abandon(self) -> None:
        for request in self._requests:
            request.fail(BatcherClosed("the batcher was closed before the results came; send the request again"))


def _one_per_item(results: Sequence[ResultT | BaseException], items: int) -> list[ResultT | BaseException]:
    """The results as a list, one per item; DispatchError where their number differs."""
    outcomes = list(results)
    if len(outcomes) != items:
        raise DispatchError(f"dispatch gave {len(outcomes)} results for {items} items; it must give one each, in order")
    return outcomes
