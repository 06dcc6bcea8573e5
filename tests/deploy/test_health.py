"""A replica that gets nowhere any more says so when Serve asks; one that is merely slow does not."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from deploy.health import MAX_FAILED_PASSES, BusyShare, UnhealthyError, WatchedWorker
from tokenalign.errors import InputError

Until = Callable[[Callable[[], bool]], Any]
LABELS = ["weather", "sport"]


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Pass:
    """A call that lasts until a test ends it."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.end.wait(60)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(clock: Clock) -> Iterator[WatchedWorker]:
    """One computing thread whose calls may take 10 s."""
    found = WatchedWorker("encoder", max_pass_s=10.0, clock=clock)
    yield found
    found.stop()


async def test_a_pass_that_never_ends(worker: WatchedWorker, clock: Clock, until: Until) -> None:
    """It is found once it takes longer than allowed, not before; and no longer once it has ended after all."""
    one = Pass()
    running = asyncio.create_task(worker.run(one))
    await until(one.begun.is_set)
    clock.now_s += 10.0
    worker.check()
    clock.now_s += 0.1
    with pytest.raises(UnhealthyError, match=r"encoder takes 10 s so far, more than health\.max_pass_s=10"):
        worker.check()
    one.end.set()
    await running
    worker.check()


async def test_waiting_is_not_computing(worker: WatchedWorker, clock: Clock, until: Until) -> None:
    """A long queue of short passes is no reason to replace a replica."""
    first, second = Pass(), Pass()
    tasks = [asyncio.create_task(worker.run(one)) for one in (first, second)]
    await until(first.begun.is_set)
    clock.now_s += 8.0
    first.end.set()
    await until(second.begun.is_set)
    clock.now_s += 8.0
    worker.check()
    second.end.set()
    await asyncio.gather(*tasks)


async def test_the_longest_of_several_passes_counts(clock: Clock, until: Until) -> None:
    """A thread that hangs is found beside others that work."""
    worker, hanging = WatchedWorker("encoder", 2, max_pass_s=10.0, clock=clock), Pass()
    stuck = asyncio.create_task(worker.run(hanging))
    await until(hanging.begun.is_set)
    clock.now_s += 11.0
    await worker.run(lambda: None)
    with pytest.raises(UnhealthyError):
        worker.check()
    hanging.end.set()
    await stuck
    worker.stop()


def failing(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


async def test_passes_that_all_fail(worker: WatchedWorker) -> None:
    """So many unforeseen errors in a row, as of a lost GPU, make a replica unhealthy; one success resets it."""
    for _ in range(MAX_FAILED_PASSES - 1):
        with pytest.raises(RuntimeError):
            await worker.run(failing(RuntimeError("CUDA error: device-side assert triggered")))
    await worker.run(lambda: None)
    for _ in range(MAX_FAILED_PASSES - 1):
        with pytest.raises(RuntimeError):
            await worker.run(failing(RuntimeError("CUDA error: device-side assert triggered")))
    worker.check()
    with pytest.raises(RuntimeError):
        await worker.run(failing(RuntimeError("CUDA error: device-side assert triggered")))
    with pytest.raises(UnhealthyError, match=f"latest {MAX_FAILED_PASSES} passes of the encoder failed"):
        worker.check()


async def test_bad_input_is_no_fault_of_the_replica(worker: WatchedWorker) -> None:
    """However often callers send what can't be computed, the replica stays."""
    for _ in range(2 * MAX_FAILED_PASSES):
        with pytest.raises(InputError):
            await worker.run(failing(InputError("has no tokens")))
    worker.check()


async def test_busy_share(worker: WatchedWorker, clock: Clock, until: Until) -> None:
    """The part of the time since the last question in which the thread computed, a pass under way counted."""
    share = BusyShare(worker, clock)
    assert share.since_last() == 0.0
    clock.now_s += 10.0
    assert share.since_last() == 0.0
    one = Pass()
    running = asyncio.create_task(worker.run(one))
    await until(one.begun.is_set)
    clock.now_s += 3.0
    one.end.set()
    await running
    clock.now_s += 9.0
    assert share.since_last() == pytest.approx(0.25)
    another = Pass()
    running = asyncio.create_task(worker.run(another))
    await until(another.begun.is_set)
    clock.now_s += 5.0
    assert share.since_last() == pytest.approx(1.0)
    another.end.set()
    await running


@pytest.fixture
async def gated_stack(run_stack: Any, gated: Any) -> AsyncIterator[Any]:
    """An application whose passes a test holds up, and which calls a pass of 50 ms too long."""
    async with run_stack(gated.model, health={"max_pass_s": 0.05}, threads={"encoder": 1}) as stack:
        yield stack


async def unhealthy(check: Callable[[], Any]) -> None:
    """Returns once the check fails."""
    async with asyncio.timeout(60):
        while True:
            try:
                await check()
            except UnhealthyError:
                return
            await asyncio.sleep(0)


async def test_a_wedged_encoder(gated_stack: Any, gated: Any) -> None:
    """A forward pass that doesn't end fails the encoder's health, not that of the scorer, which only waits for it."""
    for replica in (gated_stack.encoder, gated_stack.scorer, gated_stack.ingress):
        await replica.check_health()
    gated.backbone.gate.clear()
    asked = asyncio.create_task(gated_stack.post(text="rain", labels=LABELS))
    await unhealthy(gated_stack.encoder.check_health)
    await gated_stack.scorer.check_health()
    await gated_stack.ingress.check_health()
    gated.backbone.gate.set()
    assert (await asked).status_code == 200


async def test_health_asks_no_store(run_stack: Any, bert: Any) -> None:
    """A label store that fails, or hangs, makes no replica unhealthy."""

    class Hanging:
        """A store of which every method waits for ever."""

        def __getattr__(self, name: str) -> Any:
            async def wait(*_: Any, **__: Any) -> None:
                await asyncio.Event().wait()

            return wait

    async with run_stack(bert, store=Hanging(), start=False) as stack:
        async with asyncio.timeout(5):
            for replica in (stack.encoder, stack.scorer, stack.ingress):
                await replica.check_health()
        stack.scorer._store = stack.ingress._label_sets._store = None  # so that closing them ends


async def test_an_ingress_that_forms_no_batches(run_stack: Any, bert: Any) -> None:
    """One whose batching has ended is replaced, instead of answering 503 for ever."""
    async with run_stack(bert) as stack:
        await stack.ingress._batcher.close()
        with pytest.raises(UnhealthyError, match="no more batches"):
            await stack.ingress.check_health()
        await stack.encoder._merger.close()
        with pytest.raises(UnhealthyError, match="no more batches"):
            await stack.encoder.check_health()
