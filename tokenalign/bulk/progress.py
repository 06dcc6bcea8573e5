"""How far a run is: a bar with rate and time left on a terminal, a line every so often elsewhere."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Done:
    """What a run has done, earlier parts of it included. done, total: in the unit of the input's places."""

    rows: int
    bad: int
    done: int
    total: int | None


class Reporter(AbstractContextManager["Reporter"]):
    """Tells of progress; the first call says where the run begins, so that rates are this run's own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: Done | None = None
        self._started_s = 0.0

    def __call__(self, done: Done) -> None:
        if self._first is None:
            self._first, self._started_s = done, self._clock()
        self._tell(done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def _tell(self, done: Done) -> None:
        raise NotImplementedError

    def words(self, done: Done) -> str:
        """Rows, bad ones and rows per second."""
        assert self._first is not None  # noqa: S101  set before
        elapsed_s = self._clock() - self._started_s
        rate = f", {(done.rows - self._first.rows) / elapsed_s:,.0f} rows/s" if elapsed_s > 0 else ""
        bad = f" ({done.bad:,} bad)" if done.bad else ""
        return f"{done.rows:,} rows{bad}{rate}"

    def left_s(self, done: Done) -> float | None:
        """Seconds to go at the rate so far; None where it can't be known."""
        assert self._first is not None  # noqa: S101  set before
        moved = done.done - self._first.done
        if done.total is None or moved <= 0:
            return None
        return (self._clock() - self._started_s) * (done.total - done.done) / moved


class LineReporter(Reporter):
    """A line every ten seconds and one at the end, for logs."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._stream = stream
        self._next_s = float("-inf")

    def _tell(self, done: Done) -> None:
        now = self._clock()
        if self._next_s == float("-inf"):
            self._next_s = now + LINE_EVERY_S
            return
        if now >= self._next_s:
            self._next_s = now + LINE_EVERY_S
            left_s = self.left_s(done)
            left = "" if left_s is None else f", about {duration(left_s)} left"
            print(f"{self.words(done)}{left}", file=self._stream, flush=True)


class BarReporter(Reporter):
    """A bar by how much of the input is done."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=Console(file=stream, highlight=False),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "BarReporter":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _tell(self, done: Done) -> None:
        words = self.words(done)
        if self._task is None:
            self._task = self._bar.add_task(words, total=done.total, completed=done.done)
        else:
            self._bar.update(self._task, description=words, completed=done.done)


def reporter(stream: TextIO) -> Reporter:
    """A bar where the stream is a terminal, lines elsewhere."""
    return BarReporter(stream) if stream.isatty() else LineReporter(stream)


def duration(seconds: float) -> str:
    """A time in words: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
