"""One fetch per key at a time; whoever joins one is as well off as if it were alone."""

import asyncio
from typing import Any

import pytest

from deploy.label_cache.flights import Batch, Flights


class Source:
    """Fetches "A" for "a"; records what it is asked for, and can be held up or made to fail for single keys."""

    def __init__(self) -> None:
        self.fetched: list[list[str]] = []
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken: set[str] = set()
        self.close = True

    async def __call__(self, batch: Batch[str]) -> None:
        keys = batch.missing
        self.fetched.append(keys)
        self.asked.set()
        await self.gate.wait()
        await asyncio.sleep(0)  # as anything does that comes from another process
        if broken := self.broken.intersection(keys):
            raise OSError(f"no {sorted(broken)}")
        for key in keys:
            batch.land(key, key.upper())
        if self.close:
            batch.close(keys)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def flights() -> Flights[str]:
    return Flights()


async def start(flights: Flights[str], source: Source, keys: str) -> "asyncio.Task[dict[str, str]]":
    """A request for `keys` that is under way, held up by the source."""
    source.gate.clear()
    source.asked.clear()
    task = asyncio.create_task(flights.get_many(list(keys), source))
    await source.asked.wait()
    return task


async def test_all_who_ask_at_once_share_a_fetch(flights: Flights[str], source: Source) -> None:
    """A hundred requests for the same keys cost one fetch, and each has its own answer."""
    first = await start(flights, source, "ab")
    others = [asyncio.create_task(flights.get_many(["a", "b"], source)) for _ in range(99)]
    await asyncio.sleep(0)
    source.gate.set()
    answers = await asyncio.gather(first, *others)
    assert answers == [{"a": "A", "b": "B"}] * 100
    assert source.fetched == [["a", "b"]]
    assert len(flights) == 0


async def test_only_what_nobody_fetches_is_fetched(flights: Flights[str], source: Source) -> None:
    """Requests that share some keys fetch these once, and the others beside them."""
    first = await start(flights, source, "abc")
    second = await start(flights, source, "bcd")
    third = asyncio.create_task(flights.get_many(["d", "a"], source))
    await asyncio.sleep(0)
    source.gate.set()
    assert await first == {"a": "A", "b": "B", "c": "C"}
    assert await second == {"b": "B", "c": "C", "d": "D"}
    assert await third == {"d": "D", "a": "A"}
    assert source.fetched == [["a", "b", "c"], ["d"]]


async def test_what_landed_can_be_joined_until_it_is_closed(flights: Flights[str], source: Source) -> None:
    """A value that isn't kept elsewhere yet is given to late-comers; after that they fetch it."""
    batches: list[Batch[str]] = []

    async def fetch(batch: Batch[str]) -> None:
        batches.append(batch)
        for key in batch.missing:
            batch.land(key, "early")

    await flights.get_many(["a"], fetch)
    assert await flights.get_many(["a"], source) == {"a": "early"}
    batches[0].close(["a"])
    assert await flights.get_many(["a"], source) == {"a": "A"}


async def test_closing_late_leaves_a_newer_fetch_alone(flights: Flights[str], source: Source) -> None:
    """A batch that is closed twice doesn't end the fetch that began between."""
    batches: list[Batch[str]] = []

    async def fetch(batch: Batch[str]) -> None:
        batches.append(batch)
        batch.land("a", "early")
        batch.close(["a"])

    await flights.get_many(["a"], fetch)
    newer = await start(flights, source, "a")
    batches[0].close(["a"])
    joined = asyncio.create_task(flights.get_many(["a"], source))
    await asyncio.sleep(0)
    source.gate.set()
    assert await joined == await newer == {"a": "A"}
    assert source.fetched == [["a"]]


async def test_an_error_is_raised_and_not_kept(flights: Flights[str], source: Source) -> None:
    """Who fetches gets the error; the next request fetches anew."""
    source.broken = {"a"}
    with pytest.raises(OSError, match="no"):
        await flights.get_many(["a", "b"], source)
    assert len(flights) == 0
    source.broken = set()
    assert await flights.get_many(["a", "b"], source) == {"a": "A", "b": "B"}


async def test_an_error_of_another_key_costs_a_second_fetch(flights: Flights[str], source: Source) -> None:
    """Who joined a fetch that failed for a key of somebody else's gets its own keys all the same."""
    source.broken = {"bad"}
    source.gate.clear()
    failing = asyncio.create_task(flights.get_many(["bad", "good"], source))
    await source.asked.wait()
    joined = asyncio.create_task(flights.get_many(["good"], source))
    await asyncio.sleep(0)
    source.gate.set()
    assert await joined == {"good": "GOOD"}
    with pytest.raises(OSError, match="bad"):
        await failing
    assert source.fetched == [["bad", "good"], ["good"]]


async def test_an_error_reaches_all_who_wait(flights: Flights[str], source: Source) -> None:
    """Whoever waits for a key that can't be fetched has the error, after at most one more try of all together."""
    source.broken = {"a"}
    first = await start(flights, source, "a")
    others = [asyncio.create_task(flights.get_many(["a", str(i)], source)) for i in range(19)]
    await asyncio.sleep(0)
    source.gate.set()
    answers = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(answer) for answer in answers] == [OSError] * 20
    assert sum("a" in keys for keys in source.fetched) == 2
    assert len(flights) == 0


async def test_who_joined_can_leave(flights: Flights[str], source: Source) -> None:
    """A cancelled request that only waits for another's fetch doesn't end it."""
    first = await start(flights, source, "a")
    joined = asyncio.create_task(flights.get_many(["a"], source))
    await asyncio.sleep(0)
    joined.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joined
    source.gate.set()
    assert await first == {"a": "A"}


async def test_who_fetches_can_leave(flights: Flights[str], source: Source) -> None:
    """When a fetch is cancelled, those who joined it fetch for themselves and never get a cancellation."""
    first = await start(flights, source, "a")
    joined = asyncio.create_task(flights.get_many(["a"], source))
    await asyncio.sleep(0)
    first.cancel()
    source.gate.set()
    assert await joined == {"a": "A"}
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_fetch_that_forgets_a_key_is_an_error(flights: Flights[str]) -> None:
    """Nobody waits for ever for a key that was never landed."""

    async def forget(batch: Batch[str]) -> None:
        batch.land("a", "A")

    with pytest.raises(RuntimeError, match="1 keys have not landed"):
        await flights.get_many(["a", "b"], forget)


async def test_an_error_that_nobody_waits_for_is_no_warning(flights: Flights[str], source: Source) -> None:
    """A failed fetch that nobody joined is not reported as an exception that was never retrieved."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    source.broken = {"a"}
    with pytest.raises(OSError, match="no"):
        await flights.get_many(["a", "b"], source)
    await asyncio.sleep(0)
    assert complaints == []
