"""JSON Lines and CSV: records of text lines, and how a record becomes a row."""

import csv
import json
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tokenalign.bulk.lines import MAX_LINE_BYTES, Line, open_lines, read_lines
from tokenalign.bulk.reading import WINDOW_BYTES, Place, Reader, Source, Window
from tokenalign.bulk.rows import BadRow, Row, snippet
from tokenalign.errors import DataError

TOO_LONG = f"is longer than {MAX_LINE_BYTES:,} bytes; shorten or split its text"

RecordT = TypeVar("RecordT")


@dataclass(frozen=True, slots=True)
class _Group(Generic[RecordT]):
    start: Place
    end: Place
    records: list[RecordT]


class TextReader(Reader, Generic[RecordT]):
    """A file of records in text lines; subclasses say what a record is."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.total = None
        if source.path is not None:
            with open_lines(source.path) as file:  # also says early that it can't be read
                self.total = file.seek(0, 2)

    def windows(self, start: Place) -> Iterator[Window]:
        """The windows from `start` on, parsed."""
        for group in self._groups(start):
            rows = (self._row(number, record) for number, record in enumerate(group.records, group.start.rows))
            yield Window(group.start, group.end, tuple(row for row in rows if row is not None))

    def places(self, start: Place) -> Iterator[Place]:
        """Where the windows begin, found without parsing values."""
        return (group.start for group in self._groups(start))

    def _groups(self, start: Place) -> Iterator[_Group[RecordT]]:
        """Records in groups of `window_rows`, fewer where they are long; the same groups from any group's start on."""
        records: list[RecordT] = []
        end = start.offset
        with open_lines(self._source.path) as file:
            for record, after in self._records(
                read_lines(file, start.offset, self._source.name), at_start=not start.offset
            ):
                records.append(record)
                end = after
                if len(records) >= self._source.window_rows or end - start.offset >= WINDOW_BYTES:
                    here = Place(start.rows + len(records), end)
                    yield _Group(start, here, records)
                    start, records = here, []
        if records:
            yield _Group(start, Place(start.rows + len(records), end), records)

    @abstractmethod
    def _records(self, lines: Iterator[Line], *, at_start: bool) -> Iterator[tuple[RecordT, int]]:
        """Each record and the offset behind it."""

    @abstractmethod
    def _row(self, number: int, record: RecordT) -> Row | BadRow | None:
        """The row of a record; None for a blank line."""


class JsonLinesReader(TextReader[Line]):
    """One JSON object a line. A row's number is that of its line, from 0; blank lines are no rows."""

    def _records(self, lines: Iterator[Line], *, at_start: bool) -> Iterator[tuple[Line, int]]:
        return ((line, line.end) for line in lines)

    def _row(self, number: int, record: Line) -> Row | BadRow | None:
        if not record.whole:
            return BadRow(number, f"the line {TOO_LONG}", snippet(record.data))
        if not record.data.strip():
            return None
        raw = record.data.rstrip(b"\r\n")
        try:
            values = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            return BadRow(number, f"byte {error.start} of the line is no UTF-8", snippet(raw))
        except (ValueError, RecursionError) as error:
            return BadRow(number, f"the line is no JSON: {error}", snippet(raw))
        if not isinstance(values, dict):
            return BadRow(number, f"the line is no JSON object, but {type(values).__name__}", snippet(raw))
        return self._source.columns.row(number, values, snippet(raw))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


@dataclass(frozen=True, slots=True)
class _Record:
    """Fields of a CSV record, or what is wrong with the line that would have begun one."""

    fields: list[str]
    raw: bytes
    problem: str | None = None


class CsvReader(TextReader[_Record]):
    """CSV with a header; a quoted field may span lines. A row's number counts records behind the header, from 0.

    A line that begins a record with broken quoting is one bad row, and reading goes on at the next line.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._header = self._read_header()

    def _read_header(self) -> list[str]:
        name = self._source.name
        with open_lines(self._source.path) as file:
            first = next(_csv_records(read_lines(file, 0, name), self._source.delimiter), None)
        if first is None:
            raise DataError(f"{name} is empty; a CSV file begins with a line of column names")
        record, _ = first
        if record.problem is not None:
            raise DataError(f"{name}: its first line holds no column names: {record.problem}")
        for column in self._source.columns.names:
            if record.fields.count(column) != 1:
                found = "no column" if column not in record.fields else "several columns"
                raise DataError(f"{name} has {found} {column!r}; its header is {', '.join(map(repr, record.fields))}")
        return record.fields

    def _records(self, lines: Iterator[Line], *, at_start: bool) -> Iterator[tuple[_Record, int]]:
        records = _csv_records(lines, self._source.delimiter)
        if at_start:
            next(records, None)
        return records

    def _row(self, number: int, record: _Record) -> Row | BadRow | None:
        raw = snippet(record.raw)
        if record.problem is not None:
            return BadRow(number, record.problem, raw)
        if len(record.fields) != len(self._header):
            return BadRow(number, f"has {len(record.fields)} fields, the header has {len(self._header)}", raw)
        return self._source.columns.row(number, dict(zip(self._header, record.fields, strict=True)), raw)


class _Feeder:
    """Hands lines to the CSV parser, and takes back those behind the one that broke it."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._back: deque[Line] = deque()
        self.taken: list[Line] = []

    def __iter__(self) -> "_Feeder":
        return self

    def __next__(self) -> str:
        line = self._back.popleft() if self._back else next(self._lines)
        self.taken.append(line)
        return line.data.decode("utf-8", "surrogateescape")

    def take_back(self) -> Line:
        """The first line of the broken record; the others are read again."""
        first, *rest = self.taken
        self._back.extendleft(reversed(rest))
        return first


def _csv_records(lines: Iterator[Line], delimiter: str) -> Iterator[tuple[_Record, int]]:
    """Each record and the offset behind it; blank lines are none."""
    feeder = _Feeder(lines)
    parser = csv.reader(feeder, delimiter=delimiter, strict=True)
    while True:
        feeder.taken.clear()
        try:
            fields = next(parser)
        except StopIteration:
            return
        except csv.Error as error:
            broken = feeder.take_back()
            yield _Record([], broken.data, f"the line is no CSV record: {error}"), broken.end
            continue
        last = feeder.taken[-1]
        raw = feeder.taken[0].data if len(feeder.taken) == 1 else b"".join(line.data for line in feeder.taken)
        if not all(line.whole for line in feeder.taken):
            yield _Record([], raw, f"the line {TOO_LONG}"), last.end
        elif fields:
            yield _Record(fields, raw, _encoding_problem(raw)), last.end


def _encoding_problem(raw: bytes) -> str | None:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} of the record is no UTF-8"
    return None
