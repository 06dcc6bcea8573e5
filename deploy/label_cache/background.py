"""Work that nobody waits for, bounded, and in nobody's context."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def detached(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """`work` as a task of its own in an empty context.

    A caller who is cancelled leaves it alone, and neither the deadline nor the trace of one caller is another's.
    """
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


class Background:
    """At most `limit` pieces of work at once, so that a slow store can't hold ever more rows."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` was started; False, and it is dropped, when there is no room."""
        if len(self.tasks) >= self._limit:
            work.close()
            return False
        task = detached(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return True
