"""A batch that nobody answers is given up in time for a second try, and its slot is not held meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deploy.attempts import RECENT, UNUSUAL, UNUSUAL_S, Attempts
from deploy.wire import ReplicaLostError

Until = Callable[[Callable[[], bool]], Any]
LABELS = ["weather", "sport"]


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def for_ever() -> None:
    await asyncio.Event().wait()


async def lasting(clock: Clock, seconds: float) -> str:
    clock.now_s += seconds
    return "done"


async def test_given_up() -> None:
    """The first attempt ends at half of the time limit, the second at all of it; both as a lost replica."""
    attempts = Attempts(0.02)
    with pytest.raises(ReplicaLostError, match=r"within 0\.01 s"):
        await attempts.first(for_ever())
    with pytest.raises(ReplicaLostError, match=r"within 0\.02 s"):
        await attempts.second(for_ever())


async def test_an_attempt_is_cancelled_when_it_is_given_up() -> None:
    """Whoever works on it is told, instead of computing for nobody."""
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(ReplicaLostError):
        await Attempts(0.02).first(work())
    assert cancelled.is_set()


async def test_slow_replicas_are_waited_for() -> None:
    """Where attempts took long of late, the first is given four times the longest of them."""
    clock = Clock()
    attempts = Attempts(0.02, clock)
    assert await attempts.first(lasting(clock, 100.0)) == "done"
    waiting = asyncio.create_task(attempts.first(for_ever()))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)  # five times what it would be given without the slow one
    assert not done
    waiting.cancel()


async def test_errors_pass() -> None:
    """Errors of the work come as they are, a TimeoutError of its own among them."""

    async def work(error: Exception) -> None:
        raise error

    for error in (TimeoutError("the work's own"), ValueError("wrong")):
        with pytest.raises(type(error), match=str(error)):
            await Attempts(60.0).first(work(error))


async def test_overdue(until: Until) -> None:
    """An attempt is overdue when it takes four times as long as the longest of late, and at least 2 s."""
    clock = Clock()
    attempts = Attempts(60.0, clock)
    first = asyncio.create_task(attempts.first(for_ever()))
    await asyncio.sleep(0)
    clock.now_s += 1_000.0
    assert attempts.overdue == 0, "nothing to compare with"
    await attempts.first(lasting(clock, 1.0))
    assert attempts.overdue == 1
    second = asyncio.create_task(attempts.first(for_ever()))
    await asyncio.sleep(0)
    clock.now_s += UNUSUAL * 1.0
    assert attempts.overdue == 1
    clock.now_s += 0.1
    assert attempts.overdue == 2
    for task in (first, second):
        task.cancel()
    await until(lambda: attempts.overdue == 0)
    for _ in range(RECENT):
        await attempts.first(lasting(clock, 0.001))
    third = asyncio.create_task(attempts.first(for_ever()))
    await asyncio.sleep(0)
    clock.now_s += UNUSUAL_S
    assert attempts.overdue == 0, "0.2 s after batches of 1 ms are no sign of anything"
    clock.now_s += 0.1
    assert attempts.overdue == 1
    third.cancel()


async def test_a_replica_that_vanished(run_stack: Any, bert: Any, until: Until) -> None:
    """Its batch is answered by another one within the request's time, and others don't wait for it meanwhile."""
    async with run_stack(bert, batching={"request_timeout_s": 2.0}) as stack:
        send, vanished = stack.ingress._send, []

        async def vanishing(batch: Any) -> Any:
            if not vanished:
                vanished.append(batch)
                await for_ever()
            return await send(batch)

        stack.ingress._send, stack.slots = vanishing, 1
        lost = asyncio.create_task(stack.post(text="rain", labels=LABELS))
        await until(lambda: bool(vanished))
        stack.ingress._attempts._clock = lambda: 1e9  # a long time later
        assert (await stack.post(text="snow", labels=LABELS)).status_code == 200
        assert not lost.done()
        assert (await lost).status_code == 200
