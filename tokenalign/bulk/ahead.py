"""Work of a generator done ahead of its consumer, on a thread."""

from collections.abc import Generator, Iterator
from contextlib import suppress
from queue import Empty, Queue
from threading import Event, Thread
from typing import TypeVar

ItemT = TypeVar("ItemT")


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterator[ItemT], depth: int) -> Generator[ItemT, None, None]:
    """The same items, at most `depth` of them made before they are asked for; an error comes where it arose.

    The thread may be in the middle of a blocking read when the consumer leaves: it is not waited for, and ends with
    the item.
    """
    queue: Queue[ItemT | _End] = Queue(depth)
    left = Event()
    Thread(target=_fill, args=(queue, items, left), daemon=True, name="reading-ahead").start()
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        left.set()
        with suppress(Empty):  # one free place is enough for the thread to see that nobody waits
            while True:
                queue.get_nowait()


def _fill(queue: "Queue[ItemT | _End]", items: Iterator[ItemT], left: Event) -> None:
    end = _End(None)
    try:
        for item in items:
            if left.is_set():
                return
            queue.put(item)
            if left.is_set():
                return
    except BaseException as error:  # noqa: BLE001  raised again on the consumer's side
        end = _End(error)
    if not left.is_set():
        queue.put(end)
