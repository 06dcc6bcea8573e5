"""Input files as windows of rows, each of which can be read again from the place where it begins."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenalign.bulk.rows import BadRow, Columns, Row
from tokenalign.errors import DataError

WINDOW_ROWS = 1_024  # as many as the classifier holds at a time
WINDOW_BYTES = 4 * 2**20  # of raw rows; keeps memory flat where texts are long
HEAD_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """Between two rows of a file: the rows before it, and where it is, in bytes (in rows for Parquet)."""

    rows: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive rows of a file. start, end: the places before and behind them; blank lines are in neither kind."""

    start: Place
    end: Place
    rows: tuple[Row | BadRow, ...]


class Reader(ABC):
    """A file of rows. From a given place on its windows are always the same, wherever the reading began.

    total: the file's end in the unit of `Place.offset`, None where it can't be known
    """

    total: int | None

    @abstractmethod
    def windows(self, start: Place) -> Iterator[Window]:
        """The windows from `start` on; raises `DataError` where the file can't be read on."""

    @abstractmethod
    def places(self, start: Place) -> Iterator[Place]:
        """Where the windows from `start` on begin."""


@dataclass(frozen=True, slots=True)
class Source:
    """What to read and how. path: None is standard input; window_rows: rows of a window at most."""

    path: Path | None
    format: str
    columns: Columns
    window_rows: int = WINDOW_ROWS

    @property
    def delimiter(self) -> str:
        """Between the fields of a line, where the format has lines of fields."""
        return "\t" if self.format == "tsv" else ","

    @property
    def name(self) -> str:
        """What errors call it."""
        return "standard input" if self.path is None else str(self.path)


def file_identity(path: Path) -> dict[str, object]:
    """What tells whether a file is still the same: its size, time of change and the sha256 of its first MiB."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}; give the path of a file") from error
    return {"size": status.st_size, "modified_ns": status.st_mtime_ns, "head_sha256": head}
