"""Parquet files, read column by column in small batches."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenalign.bulk.reading import Place, Reader, Source, Window
from tokenalign.bulk.rows import BadRow, Row, snippet
from tokenalign.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow.parquet

BUFFER_BYTES = 2**20  # of a column that is being read; without it a whole column chunk is in memory


class ParquetReader(Reader):
    """A Parquet file; places count rows, and only the columns that are asked for are read."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source, self._path = source, path
        with self._open() as file:
            columns = file.schema_arrow.names
            metadata = file.metadata
            self._group_rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        for column in source.columns.names:
            if columns.count(column) != 1:
                found = "no column" if column not in columns else "several columns"
                raise DataError(f"{path} has {found} {column!r}; it has {', '.join(map(repr, columns))}")
        self.total = sum(self._group_rows)

    def windows(self, start: Place) -> Iterator[Window]:
        """The windows from `start` on."""
        arrow = _pyarrow()
        size = self._source.window_rows
        group, before = self._group_of(start.rows)
        columns = self._source.columns.names
        try:
            with self._open() as file:
                groups = list(range(group, len(self._group_rows)))
                rows = (
                    (batch, i)
                    for batch in file.iter_batches(batch_size=size, row_groups=groups, columns=columns)
                    for i in range(batch.num_rows)
                )
                wanted = islice(rows, start.rows - before, None)
                while taken := [self._row(start.rows + k, *at) for k, at in enumerate(islice(wanted, size))]:
                    end = Place(start.rows + len(taken), start.rows + len(taken))
                    yield Window(start, end, tuple(taken))
                    start = end
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{self._path} is damaged behind row {start.rows:,}: {_one_line(error)}") from error

    def places(self, start: Place) -> Iterator[Place]:
        """Known from the number of rows."""
        assert self.total is not None  # noqa: S101  set by __init__
        return (Place(rows, rows) for rows in range(start.rows, self.total, self._source.window_rows))

    def _group_of(self, row: int) -> tuple[int, int]:
        """The row group with that row, and the rows before it."""
        before = 0
        for group, rows in enumerate(self._group_rows):
            if row < before + rows:
                return group, before
            before += rows
        return len(self._group_rows), before

    def _row(self, number: int, batch: Any, i: int) -> Row | BadRow:
        values = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                values[name] = column[i].as_py()
            except UnicodeDecodeError as error:
                return BadRow(number, f"{name}: byte {error.start} is no UTF-8", snippet(bytes(error.object)))
        return self._source.columns.row(number, values, snippet(values.get(self._source.columns.text)))

    def _open(self) -> "pyarrow.parquet.ParquetFile":
        arrow = _pyarrow()
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self._path, buffer_size=BUFFER_BYTES, pre_buffer=False)
        except OSError as error:
            raise DataError(f"{self._path} can't be read: {_one_line(error)}; give the path of a file") from error
        except arrow.ArrowException as error:
            raise DataError(f"{self._path} is no Parquet file: {_one_line(error)}") from error


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow; install it with `pip install 'tokenalign[parquet]'`, or use JSON Lines"
        ) from error
    return pyarrow


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
