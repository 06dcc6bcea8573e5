"""Input files by their format."""

from pathlib import Path

from tokenalign.bulk.parquet import ParquetReader
from tokenalign.bulk.reading import Reader, Source
from tokenalign.bulk.text_files import CsvReader, JsonLinesReader
from tokenalign.errors import InputError

FORMATS = ("jsonl", "csv", "tsv", "parquet")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}


def format_of(path: Path) -> str:
    """The format that a file's name tells; `InputError` where it tells none."""
    try:
        return SUFFIXES[path.suffix.lower()]
    except KeyError:
        raise InputError(
            f"{path} ends with none of {', '.join(SUFFIXES)}; rename it or say its format with --format", ("input",)
        ) from None


def open_reader(source: Source) -> Reader:
    """The reader of a source; `DataError` where the file can't be read or lacks a column."""
    if source.path is None and source.format != "jsonl":
        raise InputError(f"can't be read as {source.format}; standard input holds JSON Lines", ("input",))
    if source.path is not None and not source.path.is_file():
        problem = "is no regular file" if source.path.exists() else "does not exist"
        raise InputError(f"{source.path} {problem}; give the path of a file, or - for standard input", ("input",))
    if source.format == "parquet":
        assert source.path is not None  # noqa: S101  said above
        return ParquetReader(source, source.path)
    return JsonLinesReader(source) if source.format == "jsonl" else CsvReader(source)
