"""The micro-batcher with a fake encoder whose batches come back when a test says so, and a clock that a test moves."""

import asyncio
import contextvars
import gc
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.batching import (
    BatcherClosed,
    BatcherError,
    BatchInfo,
    DeadlineExceeded,
    DispatchError,
    MicroBatcher,
    OversizedRequestError,
    QueueFull,
)


@dataclass(frozen=True)
class Item:
    """A text of `tokens` tokens; `caller` tells equal texts of different callers apart, as their label lists do."""

    text: str
    tokens: int
    caller: int = 0

    @property
    def answer(self) -> str:
        return f"{self.text}/{self.tokens} for {self.caller}"


def item(text: str, tokens: int = 10) -> Item:
    return Item(text, tokens)


def items(prefix: str, *tokens: int) -> list[Item]:
    return [Item(f"{prefix}{place}", n) for place, n in enumerate(tokens)]


def answers(sent: Sequence[Item]) -> list[str]:
    return [each.answer for each in sent]


@dataclass
class Sent:
    """One batch that the encoder holds until `finish`, `fail` or `give`."""

    items: list[Item]
    info: BatchInfo
    result: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def texts(self) -> list[str]:
        return [each.text for each in self.items]

    def finish(self) -> None:
        self.give(answers(self.items))

    def give(self, result: object) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class Encoder:
    """Keeps what was dispatched; with `at_once` every batch comes back by itself."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.sent: list[Sent] = []
        self.at_once = at_once

    async def __call__(self, batch: Sequence[Item], info: BatchInfo) -> Sequence[str | BaseException]:
        sent = Sent(list(batch), info)
        self.sent.append(sent)
        if self.at_once:
            sent.finish()
        result: Sequence[str | BaseException] = await sent.result
        return result

    @property
    def running(self) -> list[Sent]:
        return [sent for sent in self.sent if not sent.result.done()]


@dataclass
class Owner:
    """What the batcher asks its surroundings for."""

    slots: int = 1
    now: float = 0.0


Batching = AbstractAsyncContextManager[MicroBatcher[Item, str]]
Dispatch = Callable[[Sequence[Item], BatchInfo], Awaitable[Sequence[str | BaseException]]]


def make(dispatch: Dispatch, owner: Owner | None = None, **changes: Any) -> MicroBatcher[Item, str]:
    owner = owner or Owner()
    options: dict[str, Any] = {
        "weight": lambda each: each.tokens,
        "identity": lambda each: each.text,
        "max_batch_tokens": 100,
        "max_batch_items": 8,
        "max_queue_items": 100,
        "max_queue_tokens": 10_000,
        "slots": lambda: owner.slots,
        "slot_poll_s": 3600.0,  # a test that means the poll says so
        "clock": lambda: owner.now,
    }
    return MicroBatcher(dispatch, **(options | changes))


@asynccontextmanager
async def left_clean(batcher: MicroBatcher[Item, str]) -> AsyncIterator[MicroBatcher[Item, str]]:
    """Closes the batcher at the end, which must leave no task, no waiting item and no unheard error behind."""
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    before = asyncio.all_tasks()
    try:
        yield batcher
    finally:
        await batcher.close()
    await until(lambda: asyncio.all_tasks() <= before)
    assert (batcher.queued_items, batcher.queued_tokens, batcher.in_flight) == (0, 0, 0)
    gc.collect(1)  # what a test made is young; a full collection for each generated example takes most of the time
    assert unheard == []


def batching(dispatch: Dispatch, owner: Owner | None = None, **changes: Any) -> Batching:
    return left_clean(make(dispatch, owner, **changes))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - any condition, seen at the next turn of the loop
            await asyncio.sleep(0)


async def settle() -> None:
    """Lets everything run that can run now."""
    for _ in range(20):
        await asyncio.sleep(0)


def start(
    batcher: MicroBatcher[Item, str], sent: Sequence[Item], deadline_s: float | None = None
) -> "asyncio.Task[list[str]]":
    return asyncio.create_task(batcher.submit(sent, deadline_s=deadline_s))


async def occupy(batcher: MicroBatcher[Item, str], encoder: Encoder) -> "asyncio.Task[list[str]]":
    """Fills the one slot with a batch, so that what is submitted next waits."""
    busy = start(batcher, [item("busy")])
    await until(lambda: len(encoder.sent) == 1)
    return busy


# -- what a caller gets


async def test_a_request_gets_one_result_per_item_in_order() -> None:
    """Results come in the order of the items, whatever order the batch had."""
    async with batching(Encoder(at_once=True)) as batcher:
        sent = items("t", 30, 1, 20, 2)
        assert await batcher.submit(sent, deadline_s=None) == answers(sent)
        assert await batcher.submit([], deadline_s=None) == []


async def test_a_request_larger_than_a_batch_is_split_and_put_together_again() -> None:
    """A large request leaves in several batches and comes back whole, also where they return in another order."""
    encoder = Encoder()
    async with batching(encoder, Owner(slots=9)) as batcher:
        sent = items("t", *[25] * 10)
        request = start(batcher, sent)
        await until(lambda: len(encoder.sent) == 3)
        assert [len(batch.items) for batch in encoder.sent] == [4, 4, 2]
        for batch in reversed(encoder.sent):
            assert not request.done()
            batch.finish()
            await settle()
        assert await request == answers(sent)


async def test_what_waits_leaves_together_when_the_slot_is_free() -> None:
    """Requests that came while the slot was taken share the next batch, and without load nothing waits for company."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        busy = await occupy(batcher, encoder)
        waiting = [start(batcher, [item(name)]) for name in "abc"]
        await settle()
        assert (batcher.queued_items, batcher.queued_tokens, batcher.in_flight) == (3, 30, 1)
        encoder.sent[0].finish()
        await until(lambda: len(encoder.sent) == 2)
        assert encoder.sent[1].texts == ["a", "b", "c"]
        assert (batcher.queued_items, batcher.queued_tokens, batcher.in_flight) == (0, 0, 1)
        encoder.sent[1].finish()
        assert [await task for task in [busy, *waiting]] == [[item(name).answer] for name in ["busy", "a", "b", "c"]]


# -- what a batch holds


async def next_batches(encoder: Encoder, batcher: MicroBatcher[Item, str], *requests: list[Item]) -> list[list[str]]:
    """The texts of the batches that these requests leave in, having waited together."""
    await occupy(batcher, encoder)
    tasks = [start(batcher, request) for request in requests]
    await settle()
    encoder.at_once = True
    encoder.sent[0].finish()
    assert [await task for task in tasks] == [answers(request) for request in requests]
    return [sent.texts for sent in encoder.sent[1:]]


async def test_the_oldest_goes_first_with_what_is_nearest_in_length() -> None:
    """A batch is the oldest item and its nearest in length, up to max_batch_tokens when padded."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        requests = [[item("a20", 20)], [item("b45", 45)], [item("c19", 19)], [item("d50", 50)], [item("e22", 22)]]
        assert await next_batches(encoder, batcher, *requests) == [["a20", "c19", "e22"], ["b45", "d50"]]
        assert [sent.info.padded_tokens for sent in encoder.sent[1:]] == [66, 100]
        assert [sent.info.tokens for sent in encoder.sent[1:]] == [61, 95]


async def test_the_oldest_is_never_starved() -> None:
    """An item of an odd length goes when it is the oldest, however many better matching ones keep coming."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        await occupy(batcher, encoder)
        tasks = [start(batcher, items("short", *[10] * 8)), start(batcher, [item("odd", 90)])]
        for turn in range(1, 4):
            tasks.append(start(batcher, items(f"more{turn}-", *[10] * 8)))
            await settle()
            encoder.sent[-1].finish()
            await until(lambda turn=turn: len(encoder.sent) == turn + 1)  # type: ignore[misc]
        assert [sent.texts[0] for sent in encoder.sent[1:]] == ["short0", "odd", "more1-0"]
        assert encoder.sent[2].texts == ["odd"]
        encoder.at_once = True
        encoder.sent[-1].finish()
        await asyncio.gather(*tasks)


async def test_overdue_items_go_before_better_matching_ones() -> None:
    """Past max_age_s the age decides who joins the oldest, before it the length does."""
    for max_age_s, company in [(5.0, ["old30", "old24"]), (100.0, ["old30", "new29"])]:
        owner, encoder = Owner(), Encoder()
        async with batching(encoder, owner, max_age_s=max_age_s, max_batch_items=2) as batcher:
            await occupy(batcher, encoder)
            tasks = [start(batcher, [item("old30", 30)]), start(batcher, [item("old24", 24)])]
            await settle()
            owner.now = 5.0
            tasks.append(start(batcher, [item("new29", 29)]))
            await settle()
            encoder.at_once = True
            encoder.sent[0].finish()
            await asyncio.gather(*tasks)
            assert encoder.sent[1].texts == company
            assert encoder.sent[1].info.waited_s == 5.0


@pytest.mark.parametrize(("max_padding_share", "together"), [(0.5, False), (1.0, True)])
async def test_a_long_item_does_not_pad_many_short_ones(max_padding_share: float, together: bool) -> None:
    """No batch is more padding than max_padding_share; 1.0 lifts the bound."""
    encoder = Encoder()
    async with batching(encoder, max_batch_tokens=1000, max_padding_share=max_padding_share) as batcher:
        batches = await next_batches(encoder, batcher, items("short", 10, 10, 10, 10), [item("long", 100)])
        assert (len(batches) == 1) is together


async def test_equal_items_cost_their_tokens_once() -> None:
    """Equal texts of different callers share one row, which dispatch is told, and every caller gets an own result."""
    encoder = Encoder()
    async with batching(encoder, max_batch_tokens=100) as batcher:
        same = [[Item("same", 50, caller)] for caller in range(5)]
        batches = await next_batches(encoder, batcher, same[0], [item("other", 50)], [item("third", 50)], *same[1:])
        assert batches == [["same", "other", "same", "same", "same", "same"], ["third"]]
        assert encoder.sent[1].info.rows == (0, 1, 0, 0, 0, 0)
        assert encoder.sent[1].info.tokens == 100


async def test_an_item_heavier_than_a_batch_goes_alone() -> None:
    """An item above max_batch_tokens is served, with no other in its batch."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        batches = await next_batches(
            encoder, batcher, [item("a", 60)], [item("heavy", 101)], [item("heavy", 101)], [item("b", 2)]
        )
        assert batches == [["a"], ["heavy"], ["heavy"], ["b"]]


async def test_a_batch_holds_at_most_max_batch_items() -> None:
    """The bound on items holds for equal ones too."""
    encoder = Encoder()
    async with batching(encoder, max_batch_items=3) as batcher:
        batches = await next_batches(encoder, batcher, items("t", *[1] * 4), [item("same", 1)] * 3)
        assert [len(batch) for batch in batches] == [3, 3, 1]


async def test_a_queue_of_thousands_is_served_whole() -> None:
    """Each item is weighed and named once, however long it waits, and thousands of them come back in order."""
    weighed: list[Item] = []
    named: list[Item] = []

    def weight(each: Item) -> int:
        weighed.append(each)
        return each.tokens

    def identity(each: Item) -> str:
        named.append(each)
        return each.text

    encoder = Encoder(at_once=True)
    limits = {"max_queue_items": 6000, "max_queue_tokens": 10**6, "max_batch_items": 128, "max_batch_tokens": 4096}
    async with batching(encoder, Owner(slots=2), weight=weight, identity=identity, **limits) as batcher:
        sent = [
            items(f"r{number}-", *[8 + (number * 37 + place * 11) % 120 for place in range(100)])
            for number in range(50)
        ]
        results = await asyncio.gather(*[batcher.submit(request, deadline_s=None) for request in sent])
        assert results == [answers(request) for request in sent]
    assert len(weighed) == len(named) == 5000
    padding = sum(batch.info.padded_tokens - batch.info.tokens for batch in encoder.sent)
    assert padding < 0.1 * sum(batch.info.padded_tokens for batch in encoder.sent)


# -- trap 1: callers that leave


@pytest.mark.parametrize("outcome", [item("leaving").answer, ValueError("no such label")])
async def test_a_caller_cancelled_in_flight_does_not_disturb_its_batch(outcome: str | Exception) -> None:
    """A result or error for a caller who left is dropped, the others of the batch get theirs, and serving goes on."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        leaving, staying = start(batcher, [item("leaving")]), start(batcher, [item("staying")])
        await until(lambda: len(encoder.sent) == 1)
        assert encoder.sent[0].texts == ["leaving", "staying"]
        leaving.cancel()
        encoder.sent[0].give([outcome, item("staying").answer])
        assert await staying == [item("staying").answer]
        assert leaving.cancelled()
        encoder.at_once = True
        assert await batcher.submit([item("next")], deadline_s=None) == [item("next").answer]


async def test_a_cancelled_caller_leaves_the_queue() -> None:
    """What waits of a cancelled request is not sent and frees its room, even where a slot frees in the same moment."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        busy = await occupy(batcher, encoder)
        leaving, staying = start(batcher, items("leaving", 10, 10)), start(batcher, [item("staying")])
        await settle()
        leaving.cancel()
        await settle()
        assert (batcher.queued_items, batcher.queued_tokens) == (1, 10)
        late = start(batcher, [item("late")])
        await settle()
        encoder.sent[0].finish()
        late.cancel()
        await until(lambda: len(encoder.sent) == 2)
        assert encoder.sent[1].texts == ["staying"]
        encoder.sent[1].finish()
        assert await asyncio.gather(busy, staying)
        assert leaving.cancelled()
        assert late.cancelled()


async def test_the_rest_of_a_split_request_leaves_with_its_caller() -> None:
    """Of a request that is partly in flight, the part that waits is never sent after a cancellation."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        request = start(batcher, items("t", *[50] * 6))
        await until(lambda: len(encoder.sent) == 1)
        assert batcher.queued_items == 4
        request.cancel()
        await until(lambda: batcher.queued_items == 0)
        encoder.sent[0].finish()
        await until(lambda: batcher.in_flight == 0)
        assert len(encoder.sent) == 1


async def test_an_error_for_a_caller_who_was_dropped_is_not_reported_as_unheard() -> None:
    """A caller that is thrown away without being cancelled leaves no "exception was never retrieved" behind."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        dropped = batcher.submit([item("dropped")], deadline_s=None)
        dropped.send(None)
        await until(lambda: len(encoder.sent) == 1)
        dropped.close()
        encoder.sent[0].fail(ValueError("nobody hears this"))
        await until(lambda: batcher.in_flight == 0)
        encoder.sent.clear()  # the error's traceback keeps the request alive


async def test_a_finished_request_is_forgotten() -> None:
    """Results live no longer than their caller keeps them, however far away the deadline was."""

    class Answer(str):
        __slots__ = ("__weakref__",)

    async def dispatch(batch: Sequence[Item], info: BatchInfo) -> Sequence[str | BaseException]:
        return [Answer(each.answer) for each in batch]

    async with batching(dispatch) as batcher:
        kept = [weakref.ref(answer) for answer in await batcher.submit(items("t", 1, 2), deadline_s=3600)]
        await until(lambda: batcher.in_flight == 0)
        gc.collect()
        assert [answer() for answer in kept] == [None, None]


# -- trap 2: the first caller's context

scope: contextvars.ContextVar[list["asyncio.Task[Any]"]] = contextvars.ContextVar("scope")


async def test_no_callers_context_reaches_dispatch() -> None:
    """A context variable of a caller is unset in every dispatch, the first caller's too."""
    seen: list[object] = []

    async def dispatch(batch: Sequence[Item], info: BatchInfo) -> Sequence[str | BaseException]:
        seen.append(scope.get("nothing"))
        return answers(batch)

    async with batching(dispatch) as batcher:
        scope.set([])
        await batcher.submit([item("first")], deadline_s=None)
        await batcher.submit([item("second")], deadline_s=None)
    assert seen == ["nothing", "nothing"]


async def test_the_serving_task_has_a_context_of_its_own() -> None:
    """`slots` is asked outside of every caller's context, and what it sets there does not reach a dispatch."""
    seen: list[object] = []

    def slots() -> int:
        seen.append(scope.get(None))
        scope.set([])
        return 1

    async def dispatch(batch: Sequence[Item], info: BatchInfo) -> Sequence[str | BaseException]:
        seen.append(scope.get(None))
        return answers(batch)

    async with batching(dispatch, slots=slots) as batcher:
        scope.set([])
        await batcher.submit([item("a")], deadline_s=None)
    assert seen == [None, None]


async def test_the_first_callers_cancellation_does_not_reach_later_batches() -> None:
    """A framework that cancels what was called in a request's context ends neither the loop nor others' batches."""
    encoder = Encoder()

    async def dispatch(batch: Sequence[Item], info: BatchInfo) -> Sequence[str | BaseException]:
        if (children := scope.get(None)) is not None:  # as a handle ties a call to the request it is made in
            task = asyncio.current_task()
            assert task is not None
            children.append(task)
        return await encoder(batch, info)

    children: list[asyncio.Task[Any]] = []

    async def first_caller() -> list[str]:
        scope.set(children)
        return await batcher.submit([item("first")], deadline_s=None)

    async with batching(dispatch) as batcher:
        first = asyncio.create_task(first_caller())
        await until(lambda: len(encoder.sent) == 1)
        second = start(batcher, [item("second")])
        await settle()
        encoder.sent[0].finish()
        await until(lambda: len(encoder.sent) == 2)
        for task in [first, *children]:
            task.cancel()
        await settle()
        encoder.sent[1].finish()
        assert await second == [item("second").answer]


# -- trap 3: slots follow the replicas


async def test_slots_that_appear_are_used_without_a_new_submit() -> None:
    """While items wait, slots are asked for again at every slot_poll_s, from none to several."""
    owner, encoder = Owner(slots=0), Encoder()
    async with batching(encoder, owner, slot_poll_s=0.001, max_batch_items=1) as batcher:
        request = start(batcher, items("t", 10, 10, 10))
        await settle()
        assert encoder.sent == []
        owner.slots = 1
        await until(lambda: len(encoder.sent) == 1)
        owner.slots = 3
        await until(lambda: len(encoder.sent) == 3)
        for sent in encoder.sent:
            sent.finish()
        assert await request == answers(items("t", 10, 10, 10))


async def test_notify_asks_for_the_slots_at_once() -> None:
    """An owner who knows of new slots need not wait for the poll."""
    owner, encoder = Owner(slots=0), Encoder(at_once=True)
    async with batching(encoder, owner) as batcher:
        request = start(batcher, [item("a")])
        await settle()
        assert encoder.sent == []
        owner.slots = 1
        batcher.notify()
        assert await request == [item("a").answer]


async def test_fewer_slots_hold_back_the_next_batches() -> None:
    """Batches in flight stay when slots shrink, and none follows until they are fewer than the slots."""
    owner, encoder = Owner(slots=2), Encoder()
    async with batching(encoder, owner, max_batch_items=1) as batcher:
        request = start(batcher, items("t", 10, 10, 10))
        await until(lambda: len(encoder.sent) == 2)
        owner.slots = 1
        encoder.sent[0].finish()
        await until(lambda: batcher.in_flight == 1)
        await settle()
        assert len(encoder.sent) == 2
        encoder.sent[1].finish()
        await until(lambda: len(encoder.sent) == 3)
        encoder.sent[2].finish()
        await request


async def test_an_idle_batcher_does_not_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer runs and no slots are asked for while nothing waits."""
    asked: list[int] = []
    polls: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def watched(delay: float, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        polls.extend([delay] if delay == 0.001 else [])
        return call_later(delay, *arguments, **options)

    def slots() -> int:
        asked.append(1)
        return 1

    monkeypatch.setattr(loop, "call_later", watched)
    async with batching(Encoder(at_once=True), slots=slots, slot_poll_s=0.001) as batcher:
        await batcher.submit([item("a")], deadline_s=None)
        await until(lambda: batcher.in_flight == 0)
        before = len(asked), len(polls)
        assert min(before) > 0
        some_polls_later = asyncio.Event()
        call_later(0.02, some_polls_later.set)
        await some_polls_later.wait()
        assert (len(asked), len(polls)) == before


# -- trap 4: what an autoscaler can't see


async def test_a_batch_carries_what_is_left_waiting() -> None:
    """Each batch says how many items and tokens still wait behind it, down to none."""
    encoder = Encoder(at_once=True)
    async with batching(encoder, max_batch_items=2) as batcher:
        await batcher.submit(items("t", 10, 11, 12, 13, 14), deadline_s=None)
    assert [(sent.info.queued_items, sent.info.queued_tokens) for sent in encoder.sent] == [(3, 39), (1, 14), (0, 0)]


# -- a full queue


@pytest.mark.parametrize("limit", [{"max_queue_items": 4}, {"max_queue_tokens": 49}])
async def test_a_full_queue_refuses_at_once_and_whole(limit: dict[str, Any]) -> None:
    """Where a request does not fit as a whole, nothing of it is queued, and its error says the fill and the limit."""
    encoder = Encoder()
    async with batching(encoder, **limit) as batcher:
        await occupy(batcher, encoder)
        waiting = start(batcher, items("w", 10, 10, 10))
        await settle()
        with pytest.raises(QueueFull) as refused:
            await batcher.submit(items("x", 10, 10), deadline_s=None)
        full = refused.value
        assert (full.queued_items, full.queued_tokens) == (3, 30)
        assert {
            "max_queue_items": full.max_queue_items,
            "max_queue_tokens": full.max_queue_tokens,
        }.items() >= limit.items()
        assert all(f"{name}={value}" in str(full) for name, value in limit.items())
        assert full.retry_after_s == 1.0  # nothing was measured yet
        assert (batcher.queued_items, batcher.queued_tokens) == (3, 30)
        fitting = start(batcher, [item("y")])
        await settle()
        assert batcher.queued_items == 4
        encoder.at_once = True
        encoder.sent[0].finish()
        await asyncio.gather(waiting, fitting)
        assert not {"x0", "x1"} & {text for sent in encoder.sent for text in sent.texts}


async def test_a_slow_queue_says_so() -> None:
    """Where what waits will take longer than is wanted, at the measured pace, the error says how long."""
    owner, encoder = Owner(), Encoder()
    async with batching(encoder, owner, max_batch_items=2, max_queue_items=99) as batcher:
        batcher.check_wait(0.0)  # nothing waits, and no pace is known
        first = start(batcher, [item("measured", 100)])
        await until(lambda: len(encoder.running) == 1)
        owner.now += 10.0  # 10 tokens a second
        encoder.running[0].finish()
        await first
        busy = start(batcher, [item("busy")])
        await until(lambda: len(encoder.running) == 1)
        waiting = start(batcher, items("w", 20, 20, 20))
        await settle()
        batcher.check_wait(6.1)
        batcher.check_room(1)
        with pytest.raises(QueueFull) as refused:
            batcher.check_wait(5.9)
        assert (refused.value.wait_s, refused.value.max_wait_s) == (pytest.approx(6.0), 5.9)
        assert refused.value.retry_after_s == pytest.approx(6.0)
        assert "max_wait_s=5.9" in str(refused.value)
        encoder.at_once = True
        encoder.running[0].finish()
        await asyncio.gather(busy, waiting)


async def test_what_waits_is_spread_over_the_free_slots() -> None:
    """Items that wait for two slots go as two batches, so that one is on its way while the other is computed."""
    owner, encoder = Owner(slots=0), Encoder(at_once=True)
    async with batching(encoder, owner, min_share_items=3, max_batch_items=8) as batcher:
        for waiting, batches in [(8, [4, 4]), (9, [5, 4]), (5, [3, 2]), (2, [2]), (30, [8, 8, 7, 7])]:
            encoder.sent.clear()
            owner.slots = 0
            request = start(batcher, items(f"{waiting}-", *[1] * waiting))
            await settle()
            owner.slots = 2
            batcher.notify()
            await request
            assert [len(sent.texts) for sent in encoder.sent] == batches


async def test_a_few_items_wait_for_company_while_others_compute() -> None:
    """Fewer items than a batch in flight has don't take a slot at once, but after linger_s they do."""
    owner, encoder = Owner(slots=2), Encoder()
    async with batching(encoder, owner, linger_s=0.001) as batcher:
        first = start(batcher, items("a", 1, 1, 1))
        await until(lambda: len(encoder.running) == 1)
        few = start(batcher, [item("b", 1)])
        await settle()
        assert len(encoder.running) == 1
        more = start(batcher, items("c", 1, 1))
        await settle()
        assert [len(sent.texts) for sent in encoder.running] == [3, 3]  # now they are as many, and leave at once
        encoder.running[1].finish()
        await asyncio.gather(few, more)
        late = start(batcher, [item("d", 1)])
        await settle()
        assert len(encoder.running) == 1
        owner.now += 0.001
        await until(lambda: len(encoder.running) == 2)
        for sent in list(encoder.running):
            sent.finish()
        await asyncio.gather(first, late)
        alone = start(batcher, [item("e")])
        await until(lambda: len(encoder.running) == 1)  # nothing is in flight: at once
        encoder.running[0].finish()
        await alone


async def test_retry_after_follows_the_measured_pace() -> None:
    """The estimate is the queued tokens at the pace of the recent batches, within 0.1 to 60 s."""
    owner, encoder = Owner(), Encoder()
    async with batching(encoder, owner, max_queue_items=3) as batcher:
        for tokens, seconds in [(100, 5.0), (100, 5.0)]:  # 20 tokens a second
            request = start(batcher, [item("measured", tokens)])
            await until(lambda: len(encoder.running) == 1)
            owner.now += seconds
            encoder.running[0].finish()
            await request
        busy = start(batcher, [item("busy")])
        await until(lambda: len(encoder.running) == 1)
        for tokens, retry_after_s in [(60, 3.0), (1, 0.1), (9000, 60.0)]:
            waiting = start(batcher, [item("w", tokens)])
            await settle()
            with pytest.raises(QueueFull) as refused:
                await batcher.submit(items("x", 1, 1, 1), deadline_s=None)
            assert refused.value.retry_after_s == pytest.approx(retry_after_s)
            waiting.cancel()
            await until(lambda: batcher.queued_items == 0)
        encoder.running[0].finish()
        await busy


@pytest.mark.parametrize("limit", [{"max_queue_items": 4}, {"max_queue_tokens": 49}])
async def test_a_request_that_never_fits_is_told_so(limit: dict[str, Any]) -> None:
    """A request above the queue's own bounds gets an error that asks for parts instead of a later time."""
    async with batching(Encoder(), **limit) as batcher:
        with pytest.raises(OversizedRequestError, match=r"5 items and 50 tokens .* in parts"):
            await batcher.submit(items("x", *[10] * 5), deadline_s=None)
        assert batcher.queued_items == 0


# -- errors


async def test_one_bad_item_fails_its_request_alone() -> None:
    """An exception among the results goes to its caller; what waits of that request leaves, the others get theirs."""
    encoder = Encoder()
    async with batching(encoder, max_batch_items=2) as batcher:
        bad, good = start(batcher, items("bad", 10, 90, 90, 90)), start(batcher, [item("good")])
        await until(lambda: len(encoder.sent) == 1)
        assert encoder.sent[0].texts == ["bad0", "good"]
        error = ValueError("no such label")
        encoder.sent[0].give([error, item("good").answer])
        assert await good == [item("good").answer]
        with pytest.raises(ValueError, match="no such label") as raised:
            await bad
        assert raised.value is error
        await until(lambda: batcher.queued_items == 0)
        await settle()
        assert len(encoder.sent) == 1


async def test_a_dispatch_that_raises_fails_its_batch_and_serving_goes_on() -> None:
    """Every request of the batch gets the error, those of other batches don't."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        both = [start(batcher, [item("a")]), start(batcher, [item("b")])]
        await until(lambda: len(encoder.sent) == 1)
        after = start(batcher, [item("c")])
        await settle()
        encoder.sent[0].fail(ConnectionError("encoder gone"))
        for task in both:
            with pytest.raises(ConnectionError, match="encoder gone"):
                await task
        await until(lambda: len(encoder.sent) == 2)
        encoder.sent[1].finish()
        assert await after == [item("c").answer]


@pytest.mark.parametrize("result", [[], ["one"], ["one", "two", "three"], None])
async def test_a_wrong_number_of_results_is_an_error_of_that_batch(result: object) -> None:
    """No result is handed out from a batch that has not one for each item."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        both = [start(batcher, [item("a")]), start(batcher, [item("b")])]
        await until(lambda: len(encoder.sent) == 1)
        encoder.sent[0].give(result)
        for task in both:
            with pytest.raises(TypeError if result is None else DispatchError):
                await task
        encoder.at_once = True
        assert await batcher.submit([item("c")], deadline_s=None) == [item("c").answer]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), StopIteration(), GeneratorExit()])
async def test_an_error_that_no_future_takes_is_wrapped(error: BaseException) -> None:
    """A dispatch that gives such an error, or is cancelled inside, fails its callers with DispatchError."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        both = [start(batcher, [item("a")]), start(batcher, [item("b")])]
        await until(lambda: len(encoder.sent) == 1)
        encoder.sent[0].give([error, item("b").answer])
        with pytest.raises(DispatchError) as raised:
            await both[0]
        assert raised.value.__cause__ is error
        assert await both[1] == [item("b").answer]

        cancelled = start(batcher, [item("c")])
        await until(lambda: len(encoder.sent) == 2)
        encoder.sent[1].result.cancel()
        with pytest.raises(DispatchError):
            await cancelled
        encoder.at_once = True
        assert await batcher.submit([item("d")], deadline_s=None) == [item("d").answer]


def broken_weight(each: Item) -> int:
    return each.tokens if each.text != "bad" else 1 // 0


def negative_weight(each: Item) -> int:
    return each.tokens if each.text != "bad" else -1


def nan_weight(each: Item) -> int:
    return each.tokens if each.text != "bad" else float("nan")  # type: ignore[return-value]


def broken_identity(each: Item) -> Hashable:
    return each.text if each.text != "bad" else {"good": 1}["bad"]


def unhashable_identity(each: Item) -> Hashable:
    return each.text if each.text != "bad" else [each.text]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "function", "error"),
    [
        ("weight", broken_weight, ZeroDivisionError),
        ("weight", negative_weight, ValueError),
        ("weight", nan_weight, TypeError),
        ("identity", broken_identity, KeyError),
        ("identity", unhashable_identity, TypeError),
    ],
)
async def test_a_bug_in_weight_or_identity_fails_that_submit_alone(
    name: str, function: Callable[[Item], Any], error: type[Exception]
) -> None:
    """Nothing of the request is queued, and others are served."""
    async with batching(Encoder(at_once=True), Owner(), **{name: function}) as batcher:
        with pytest.raises(error):
            await batcher.submit([item("a"), item("bad")], deadline_s=None)
        assert (batcher.queued_items, batcher.queued_tokens) == (0, 0)
        assert await batcher.submit([item("b")], deadline_s=None) == [item("b").answer]


async def test_a_bug_in_slots_is_logged_once_and_outlived(caplog: pytest.LogCaptureFixture) -> None:
    """Serving goes on at the poll after the error is gone, with one log record for the whole time."""
    asked: list[int] = []

    def slots() -> int:
        asked.append(1)
        if len(asked) < 5:
            raise LookupError("no replicas known")
        return 1

    with caplog.at_level(logging.ERROR, logger="deploy.batching"):
        async with batching(Encoder(at_once=True), slots=slots, slot_poll_s=0.001) as batcher:
            assert await batcher.submit([item("a")], deadline_s=None) == [item("a").answer]
    assert [record.exc_text is not None for record in caplog.records] == [True]


# -- deadlines


async def test_an_item_past_its_deadline_is_not_sent() -> None:
    """What waited too long gets DeadlineExceeded in place of a batch, and those behind it go."""
    owner, encoder = Owner(), Encoder()
    async with batching(encoder, owner) as batcher:
        await occupy(batcher, encoder)
        late, patient = start(batcher, items("late", 10, 10), deadline_s=500), start(batcher, [item("patient")], 501)
        await settle()
        owner.now = 500
        encoder.at_once = True
        encoder.sent[0].finish()
        with pytest.raises(DeadlineExceeded, match="deadline_s=500"):
            await late
        assert await patient == [item("patient").answer]
        assert encoder.sent[1].texts == ["patient"]


async def test_a_deadline_ends_the_wait_for_a_slot() -> None:
    """Without any slot the caller still hears at its deadline, and its items leave the queue."""
    async with batching(Encoder(), Owner(slots=0)) as batcher:
        with pytest.raises(DeadlineExceeded):
            await batcher.submit([item("a")], deadline_s=0.01)
        assert batcher.queued_items == 0


async def test_a_deadline_ends_the_wait_for_a_batch() -> None:
    """In flight the caller hears at its deadline; the late result is dropped, and its batch's others get theirs."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        impatient, patient = start(batcher, [item("impatient")], 0.01), start(batcher, [item("patient")], 3600)
        await until(lambda: len(encoder.sent) == 1)
        assert len(encoder.sent[0].items) == 2
        with pytest.raises(DeadlineExceeded):
            await impatient
        encoder.sent[0].finish()
        assert await patient == [item("patient").answer]


async def test_a_deadline_that_has_passed_already_sends_nothing() -> None:
    """No time left means no work done."""
    encoder = Encoder(at_once=True)
    async with batching(encoder) as batcher:
        with pytest.raises(DeadlineExceeded):
            await batcher.submit([item("a")], deadline_s=0)
        assert encoder.sent == []


# -- the end


async def test_close_fails_what_waits_and_what_is_in_flight() -> None:
    """After close every caller has BatcherClosed, the batch in flight is cancelled, and new requests are refused."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        flying = await occupy(batcher, encoder)
        waiting = start(batcher, [item("waiting")])
        await settle()
        await batcher.close()
        for task in [flying, waiting]:
            with pytest.raises(BatcherClosed):
                await task
        assert encoder.sent[0].result.cancelled()
        with pytest.raises(BatcherClosed):
            await batcher.submit([item("late")], deadline_s=None)
        assert len(encoder.sent) == 1


async def test_close_can_drain() -> None:
    """A drain serves all that was accepted, refuses what comes later, and then ends."""
    encoder = Encoder()
    async with batching(encoder) as batcher:
        accepted = [await occupy(batcher, encoder), start(batcher, [item("waiting")])]
        await settle()
        closing = asyncio.create_task(batcher.close(drain=True))
        await settle()
        with pytest.raises(BatcherClosed):
            await batcher.submit([item("late")], deadline_s=None)
        assert not closing.done()
        encoder.at_once = True
        encoder.sent[0].finish()
        await closing
        assert await asyncio.gather(*accepted) == [[item("busy").answer], [item("waiting").answer]]


async def test_a_drain_that_takes_too_long_ends_like_a_close() -> None:
    """A cancelled drain leaves no task and no waiting caller."""
    encoder = Encoder()
    async with batching(encoder, Owner(slots=1)) as batcher:
        stuck = await occupy(batcher, encoder)
        closing = asyncio.create_task(batcher.close(drain=True))
        await settle()
        closing.cancel()
        with pytest.raises(BatcherClosed):
            await stuck
        await asyncio.wait({closing})
        assert closing.cancelled()
        assert batcher.in_flight == 0


async def test_a_stopping_event_loop_strands_nobody() -> None:
    """Where the serving task is cancelled from outside, as asyncio.run does at its end, callers hear of it."""
    encoder = Encoder()
    async with batching(encoder, Owner(slots=0)) as batcher:
        before = asyncio.all_tasks()
        waiting = start(batcher, [item("waiting")])
        await settle()
        (server,) = asyncio.all_tasks() - before - {waiting}
        server.cancel()
        with pytest.raises(BatcherClosed):
            await waiting
        with pytest.raises(BatcherClosed):
            await batcher.submit([item("late")], deadline_s=None)


async def test_a_batcher_that_never_served_can_be_closed_twice() -> None:
    """Close needs no prior submit and may be repeated."""
    batcher = make(Encoder())
    await batcher.close(drain=True)
    await batcher.close()
    with pytest.raises(BatcherClosed):
        await batcher.submit([item("a")], deadline_s=None)


@pytest.mark.parametrize(
    "option",
    [
        {"max_batch_tokens": 0},
        {"max_batch_items": 0},
        {"max_queue_items": 0},
        {"max_queue_tokens": 0},
        {"max_age_s": -1.0},
        {"slot_poll_s": 0.0},
        {"max_padding_share": 1.5},
    ],
)
def test_an_option_out_of_bounds_is_named(option: dict[str, Any]) -> None:
    """The error names the option and its value."""
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make(Encoder(), **option)


def test_the_errors_have_one_base() -> None:
    """One except clause catches all that the batcher itself raises."""
    assert all(
        issubclass(error, BatcherError)
        for error in (QueueFull, OversizedRequestError, DeadlineExceeded, BatcherClosed, DispatchError)
    )


# -- everything at once


class ItemError(Exception):
    """An error that the fake encoder gave for one item."""


class BatchError(Exception):
    """An error that the fake encoder raised for a batch."""


MAX_BATCH_TOKENS, MAX_BATCH_ITEMS, MAX_QUEUE_ITEMS, MAX_QUEUE_TOKENS = 40, 5, 20, 150

MODEL_LIMITS = {
    "max_batch_tokens": MAX_BATCH_TOKENS,
    "max_batch_items": MAX_BATCH_ITEMS,
    "max_queue_items": MAX_QUEUE_ITEMS,
    "max_queue_tokens": MAX_QUEUE_TOKENS,
    "max_age_s": 2.0,
}

requests = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 7, 8, 9, 20, 41])), max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), requests, st.none() | st.sampled_from([1000, 3000])),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("return"), st.integers(0, 5), st.sampled_from(["fine", "raise", "mixed", "short", "cancel"])),
        st.tuples(st.just("slots"), st.integers(0, 3)),
        st.tuples(st.just("clock"), st.sampled_from([1, 2, 1000])),
        st.tuples(st.just("run"), st.integers(1, 6)),
    ),
    min_size=10,
    max_size=60,
)


class Model:
    """Runs one sequence of steps and keeps what every caller may expect."""

    def __init__(self) -> None:
        self.owner, self.encoder = Owner(slots=1), Encoder()
        self.submitted: list[tuple[list[Item], int | None, asyncio.Task[list[str]]]] = []
        self.batcher = make(self.dispatch, self.owner, slots=self.slots, **MODEL_LIMITS)
        self.grants = 0  # how often the batcher was told of a slot that was free then
        self.broken: set[str] = set()  # answers that the encoder did not give

    def slots(self) -> int:
        self.grants += self.batcher.in_flight < self.owner.slots
        return self.owner.slots

    async def dispatch(self, batch: Sequence[Item], info: BatchInfo) -> Sequence[str | BaseException]:
        assert len(self.encoder.sent) < self.grants  # each batch asked for its slot
        assert info.padded_tokens <= MAX_BATCH_TOKENS or len(batch) == 1
        assert len(batch) <= MAX_BATCH_ITEMS
        weights = {each.text: each.tokens for each in batch}
        assert info.tokens == sum(weights.values())
        assert info.padded_tokens == len(weights) * max(weights.values())
        assert [list(weights)[row] for row in info.rows] == [each.text for each in batch]
        return await self.encoder(batch, info)

    async def run(self, actions: Sequence[tuple[Any, ...]]) -> None:
        async with left_clean(self.batcher) as batcher:
            for action, *arguments in actions:
                await getattr(self, f"do_{action}")(batcher, *arguments)
                assert 0 <= batcher.queued_items <= MAX_QUEUE_ITEMS
                assert 0 <= batcher.queued_tokens <= MAX_QUEUE_TOKENS
            self.owner.slots, self.encoder.at_once = 2, True
            for sent in self.encoder.running:
                sent.finish()
            batcher.notify()
            await until(lambda: all(task.done() for _, _, task in self.submitted))
            await until(lambda: (batcher.queued_items, batcher.queued_tokens, batcher.in_flight) == (0, 0, 0))
        for sent_items, deadline_s, task in self.submitted:
            self.check(sent_items, deadline_s, task)

    async def do_submit(
        self, batcher: MicroBatcher[Item, str], wanted: list[tuple[str, int]], deadline_s: int | None
    ) -> None:
        caller = len(self.submitted)
        # Equal names with equal tokens are equal texts, from whichever caller.
        sent = [Item(f"{name}{tokens}", tokens, caller) for name, tokens in wanted]
        self.submitted.append((sent, deadline_s, start(batcher, sent, deadline_s)))

    async def do_cancel(self, batcher: MicroBatcher[Item, str], which: int) -> None:
        if self.submitted:
            self.submitted[which % len(self.submitted)][2].cancel()

    async def do_return(self, batcher: MicroBatcher[Item, str], which: int, how: str) -> None:
        if not self.encoder.running:
            return
        sent = self.encoder.running[which % len(self.encoder.running)]
        if how != "fine":
            self.broken |= set(answers(sent.items[:1] if how == "mixed" else sent.items))
        if how == "fine":
            sent.finish()
        elif how == "raise":
            sent.fail(BatchError())
        elif how == "mixed":
            sent.give([ItemError(), *answers(sent.items[1:])])
        elif how == "short":
            sent.give(answers(sent.items[1:]))
        else:
            sent.result.cancel()

    async def do_slots(self, batcher: MicroBatcher[Item, str], slots: int) -> None:
        self.owner.slots = slots
        batcher.notify()

    async def do_clock(self, batcher: MicroBatcher[Item, str], seconds: int) -> None:
        self.owner.now += seconds

    async def do_run(self, batcher: MicroBatcher[Item, str], turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    def check(self, sent: list[Item], deadline_s: int | None, task: "asyncio.Task[list[str]]") -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            assert task.result() == answers(sent)
        elif isinstance(error, (ItemError, BatchError, DispatchError)):
            assert self.broken & set(answers(sent))
        elif isinstance(error, OversizedRequestError):
            assert sum(each.tokens for each in sent) > MAX_QUEUE_TOKENS
        elif isinstance(error, DeadlineExceeded):
            assert deadline_s is not None
            assert self.owner.now >= deadline_s
        else:
            assert isinstance(error, QueueFull)


@settings(deadline=None, max_examples=100)
@given(steps)
def test_any_mix_of_callers_failures_and_slots_ends_well(actions: list[tuple[Any, ...]]) -> None:
    """Every caller who stays gets exactly its own results or its own error, within all bounds, and nothing is left."""
    asyncio.run(Model().run(actions))
