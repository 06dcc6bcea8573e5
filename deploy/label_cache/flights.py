"""One fetch of each key, however many ask for it at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Batch(Generic[Value]):
    """The keys that one fetch is to land. Those that landed can be joined until they are closed."""

    def __init__(self, flights: "dict[str, asyncio.Future[Value]]", keys: Sequence[str]) -> None:
        loop = asyncio.get_running_loop()
        self._flights = flights
        self._own: dict[str, asyncio.Future[Value]] = {key: loop.create_future() for key in keys}
        flights.update(self._own)

    @property
    def missing(self) -> list[str]:
        """The keys that haven't landed, in the order they were asked for."""
        return [key for key, future in self._own.items() if not future.done()]

    def land(self, key: str, value: Value) -> None:
        """Gives the value to all who wait for `key`, and to all who ask before it is closed."""
        self._own[key].set_result(value)

    def close(self, keys: Iterable[str]) -> None:
        """From now on who asks for `keys` fetches them anew: they are kept elsewhere, or can't be."""
        for key in keys:
            if self._flights.get(key) is self._own[key]:
                del self._flights[key]

    def fail(self, error: Exception) -> None:
        """Ends the fetch of what is still missing: those who wait get the error, those who ask later don't."""
        for key in self.missing:
            self._own[key].set_exception(error)
            self._own[key].exception()  # asked for here in case that nobody waits
            self.close([key])


Fetch = Callable[[Batch[Value]], Awaitable[None]]


class Flights(Generic[Value]):
    """Fetches under way, by key. Whoever needs a key that is being fetched waits for that fetch.

    A fetch never waits for another one, so there is no circle of fetches that wait for each other.
    """

    def __init__(self) -> None:
        self._flights: dict[str, asyncio.Future[Value]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def get_many(self, keys: Sequence[str], fetch: Fetch[Value]) -> dict[str, Value]:
        """The value of each of `keys`, which are distinct.

        `fetch` gets a batch of those that nobody is fetching; it lands each of them, and later closes them. Its error
        is raised, and reaches those who joined: they ask for the keys once more themselves, because the fault may have
        been another key's of the same batch, and raise what they get then.
        """
        values, failed = await self._fly(keys, fetch)
        if failed:
            again, failed = await self._fly(list(failed), fetch)
            values |= again
        for error in failed.values():
            raise error
        return values

    async def _fly(self, keys: Sequence[str], fetch: Fetch[Value]) -> tuple[dict[str, Value], dict[str, BaseException]]:
        """The values of the keys fetched here or elsewhere, and the errors of those whose fetch elsewhere failed."""
        flights = {key: self._flights[key] for key in keys if key in self._flights}
        batch = Batch(self._flights, [key for key in keys if key not in flights])
        flights |= {key: self._flights[key] for key in batch.missing}
        if batch.missing:
            await _run(batch, fetch)
        await asyncio.wait(flights.values())  # unlike `await`, it doesn't pass a cancellation on to the fetch
        failed = {key: error for key, flight in flights.items() if (error := flight.exception()) is not None}
        return {key: flight.result() for key, flight in flights.items() if key not in failed}, failed


async def _run(batch: Batch[Value], fetch: Fetch[Value]) -> None:
    try:
        await fetch(batch)
    except Exception as error:
        batch.fail(error)
        raise
    except BaseException:  # the application ends
        batch.fail(RuntimeError("the fetch was cancelled"))
        raise
    if missing := batch.missing:
        forgotten = RuntimeError(f"the fetch ended, and {len(missing)} keys have not landed")
        batch.fail(forgotten)
        raise forgotten
