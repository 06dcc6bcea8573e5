"""Rows of an input file: what makes one good, and what is told of a bad one."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

from tokenalign.errors import InputError
from tokenalign.labels import check_text

MAX_TEXT_CHARS = 100_000
MAX_ID_CHARS = 1_000
RAW_CHARS = 200  # of a bad row that are quoted beside the reason

RowId = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Row:
    """A text to classify. number: of the row in its file, from 0; id: what the caller's id column holds."""

    number: int
    text: str
    id: RowId = None


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be classified, why, and its beginning as it stands in the file."""

    number: int
    reason: str
    raw: str


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of the input are read: the text, and maybe an id that the answer repeats."""

    text: str = "text"
    id: str | None = None

    @property
    def names(self) -> list[str]:
        """The columns that every row must have."""
        return [self.text] if self.id is None else list(dict.fromkeys([self.text, self.id]))

    def row(self, number: int, values: Mapping[str, object], raw: str) -> Row | BadRow:
        """Row `number` with these values; a bad one where a column is absent or holds something else."""
        for name in self.names:
            if name not in values:
                return BadRow(number, f"{name}: is missing; the row has {reprlib.repr(list(values))}", raw)
        try:
            text = check_text(values[self.text], (self.text,), MAX_TEXT_CHARS)
            row_id = None if self.id is None else _check_id(values[self.id], self.id)
        except InputError as error:
            return BadRow(number, str(error), raw)
        return Row(number, text, row_id)


def snippet(raw: object) -> str:
    """The beginning of a raw row, bytes that are no UTF-8 written as escapes."""
    if isinstance(raw, bytes):
        return raw[: 4 * RAW_CHARS].decode("utf-8", "backslashreplace")[:RAW_CHARS]
    text = raw if isinstance(raw, str) else reprlib.repr(raw)
    return text[:RAW_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")


def _check_id(value: object, column: str) -> RowId:
    if isinstance(value, str):
        if len(value) > MAX_ID_CHARS:
            raise InputError(f"has {len(value):,} characters, at most {MAX_ID_CHARS:,} allowed", (column,))
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"has a lone surrogate at position {error.start}; send valid Unicode", (column,)
            ) from error
        return value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise InputError(f"must be a string or a finite number, not {reprlib.repr(value)}", (column,))
