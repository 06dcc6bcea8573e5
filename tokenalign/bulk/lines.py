"""Physical lines of a UTF-8 file, of bounded length, each with the offset of its end."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tokenalign.errors import DataError

MAX_LINE_BYTES = 4 * 2**20  # a text of the greatest length, each character an escape, and other columns beside it
SKIP_BYTES = 2**16
BOM = b"\xef\xbb\xbf"
OTHER_ENCODINGS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its end as it stands in the file. end: the offset behind it; whole: no part of it is left out."""

    data: bytes
    end: int
    whole: bool = True


def open_lines(path: Path | None) -> BinaryIO:
    """The open file; None opens standard input anew, so that nobody waits for the interpreter's own."""
    if path is None:
        return open(0, "rb", closefd=False)
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}; give the path of a file") from error


def read_lines(file: BinaryIO, offset: int, name: str) -> Iterator[Line]:
    """The lines from `offset` on, a byte order mark at the file's start left out.

    Of a line beyond `MAX_LINE_BYTES` only the beginning is held. Raises `DataError` for another encoding's mark, or
    when reading fails.
    """
    try:
        if offset:
            file.seek(offset)
        while data := file.readline(MAX_LINE_BYTES + 1):
            at_start = offset == 0
            offset += len(data)
            whole = len(data) <= MAX_LINE_BYTES or data.endswith(b"\n")
            if not whole:
                offset += _skip_line(file)
            if at_start:
                if data.startswith(OTHER_ENCODINGS):
                    raise DataError(f"{name} is UTF-16, as its byte order mark says; convert it to UTF-8")
                data = data.removeprefix(BOM)
            yield Line(data, offset, whole)
    except OSError as error:
        raise DataError(f"{name} can't be read: {error.strerror or error}") from error


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while data := file.readline(SKIP_BYTES):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped
