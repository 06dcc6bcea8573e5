"""Output that survives a stop at any moment: files of whole lines, and a progress file that says up to where.

Lines are appended and brought to disk, then the progress file is replaced in one step. Whatever stands in the output
behind the length that the progress file names, half a line perhaps, is cut off by the run that goes on.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from tokenalign.bulk.answering import Lines
from tokenalign.bulk.reading import Place
from tokenalign.errors import BulkError

VERSION = 1


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """Where answers, bad rows and progress are written."""

    output: Path
    errors: Path

    @classmethod
    def of(cls, output: Path, errors: Path | None = None) -> "OutputPaths":
        """The paths for an output; bad rows go beside it, `answers.jsonl` to `answers.errors.jsonl`, unless told."""
        return cls(output, errors or output.with_suffix(".errors.jsonl"))

    @property
    def progress(self) -> Path:
        """The file that is there while a run is unfinished."""
        return self.output.with_name(f"{self.output.name}.progress.json")


@dataclass(slots=True)
class _State:
    place: Place = field(default_factory=Place)
    good: int = 0
    bad: int = 0
    output_bytes: int = 0
    errors_bytes: int = 0
    model: str | None = None


class Output:
    """The files of one run. `place` is the place in the input up to which they hold everything; none is read twice.

    good, bad: rows written so far, those of earlier runs included
    """

    def __init__(
        self, paths: OutputPaths, run: Mapping[str, object], *, overwrite: bool = False, resumable: bool = True
    ) -> None:
        """Open the files to go on with an unfinished run, or to begin.

        run: what must be the same for a run to be gone on with; JSON values
        Raises `BulkError` where the files belong to something else, another run is at work on them, or writing fails.
        """
        self._paths, self._run = paths, dict(run)
        self._resumable = resumable
        self._output = self._errors = None
        self._state = _State()
        try:
            self._output = _open(paths.output)
            self._lock()
            self._errors = _open(paths.errors)
            self._state = self._begin(overwrite=overwrite)
        except BaseException:
            self._close_files()
            raise

    @property
    def place(self) -> Place:
        """Up to where the input is done."""
        return self._state.place

    @property
    def good(self) -> int:
        """Rows with an answer."""
        return self._state.good

    @property
    def bad(self) -> int:
        """Rows in the side file."""
        return self._state.bad

    def bind_model(self, fingerprint: str) -> None:
        """Remember whose answers these are; `BulkError` where another model gave those that are there."""
        if self._state.model is not None and self._state.model != fingerprint:
            raise BulkError(
                f"{self._paths.output}: its first {self._state.place.rows:,} rows were answered by model "
                f"{self._state.model[:12]}, this one is {fingerprint[:12]}; use the same model, device type and "
                "dtype, or --overwrite to start anew"
            )
        self._state.model = fingerprint

    def commit(self, lines: Lines, end: Place) -> None:
        """Returns when the lines are on disk and the rows before `end` will not be read again."""
        assert self._output is not None and self._errors is not None  # noqa: S101, PT018  open until closed
        state = self._state
        written = _State(
            end,
            state.good + lines.good_rows,
            state.bad + lines.bad_rows,
            state.output_bytes + len(lines.good),
            state.errors_bytes + len(lines.bad),
            state.model,
        )
        _append(self._paths.output, self._output, lines.good)
        _append(self._paths.errors, self._errors, lines.bad)
        self._save(written)
        self._state = written

    def finish(self) -> None:
        """The input is done: take away the progress file, and the side file where it is empty."""
        if self._resumable:
            self._paths.progress.unlink(missing_ok=True)
        if self._state.errors_bytes == 0:
            self._paths.errors.unlink(missing_ok=True)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # what can't be cut now is cut by the next run
            self._cut()
        self._close_files()

    def _begin(self, *, overwrite: bool) -> _State:
        state = None if overwrite or not self._resumable else self._load()
        if state is None:
            if not overwrite:
                self._refuse_full()
            state = _State()
            if self._resumable:
                self._save(state)  # before anything is cut: a run that is killed here may be begun again
            else:
                self._paths.progress.unlink(missing_ok=True)
        elif (size := self._size(self._output)) < state.output_bytes or self._size(self._errors) < state.errors_bytes:
            raise BulkError(
                f"{self._paths.output} or {self._paths.errors} is shorter than {self._paths.progress} says "
                f"({size:,} of {state.output_bytes:,} bytes); they were changed since, use --overwrite to start anew"
            )
        self._state = state
        try:
            self._cut()
        except OSError as error:
            raise BulkError(f"{self._paths.output} can't be cut: {error.strerror or error}") from error
        if not state.place.rows:
            self._save(state)
        return state

    def _refuse_full(self) -> None:
        for path, file in ((self._paths.output, self._output), (self._paths.errors, self._errors)):
            if self._size(file):
                raise BulkError(
                    f"{path} is there already, and no unfinished run of it to go on with; "
                    "use --overwrite to replace it, or write elsewhere"
                )
        if not self._resumable and self._paths.progress.exists():
            raise BulkError(f"{self._paths.progress} is of an unfinished run; use --overwrite, or write elsewhere")

    def _load(self) -> _State | None:
        path = self._paths.progress
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            same = saved["run"]
            numbers = [saved[key] for key in ("rows", "offset", "good", "bad", "output_bytes", "errors_bytes")]
            model = saved["model"]
            known = saved["version"] == VERSION and isinstance(same, dict)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BulkError(f"{path} can't be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise BulkError(f"{path} is no progress file; use --overwrite to start anew, or write elsewhere") from error
        if not known or not all(type(number) is int and number >= 0 for number in numbers):
            raise BulkError(f"{path} is of another version; use --overwrite to start anew, or write elsewhere")
        run = json.loads(json.dumps(self._run))  # as it reads from a file
        different = [key for key in {**run, **same} if run.get(key) != same.get(key)]
        if different and numbers[0]:  # of a run that has no answer yet there is nothing to keep
            raise BulkError(
                f"{self._paths.output}: the unfinished run there had another {', '.join(different)}; "
                "repeat it as it was to go on, use --overwrite to start anew, or write elsewhere"
            )
        rows, offset, good, bad, output_bytes, errors_bytes = numbers
        return _State(Place(rows, offset), good, bad, output_bytes, errors_bytes, model)

    def _save(self, state: _State) -> None:
        if not self._resumable:
            return
        content = {
            "version": VERSION,
            "rows": state.place.rows,
            "offset": state.place.offset,
            "good": state.good,
            "bad": state.bad,
            "output_bytes": state.output_bytes,
            "errors_bytes": state.errors_bytes,
            "model": state.model,
            "run": self._run,
        }
        path = self._paths.progress
        fresh = path.with_name(f"{path.name}.new")
        try:
            with fresh.open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise _cant_write(path, error) from error

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        assert self._output is not None  # noqa: S101  opened before
        try:
            fcntl.flock(self._output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BulkError(f"another run is writing {self._paths.output}; wait for it, or write elsewhere") from error
        except OSError:  # a file system without locks
            return

    def _cut(self) -> None:
        for file, size in ((self._output, self._state.output_bytes), (self._errors, self._state.errors_bytes)):
            assert file is not None  # noqa: S101  opened before
            file.truncate(size)
            file.seek(size)

    def _close_files(self) -> None:
        for file in (self._output, self._errors):
            if file is not None:
                file.close()

    @staticmethod
    def _size(file: FileIO | None) -> int:
        assert file is not None  # noqa: S101  opened before
        return os.fstat(file.fileno()).st_size


def _open(path: Path) -> FileIO:
    """Open to write, created where absent; unbuffered, so that nothing is written after an error."""
    if path.exists() and not path.is_file():
        raise BulkError(f"{path} is no regular file, so a stopped run could not go on with it; write to a file")
    try:
        return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")
    except OSError as error:
        raise BulkError(f"{path} can't be written: {error.strerror or error}") from error


def _append(path: Path, file: FileIO, data: bytes) -> None:
    if not data:
        return
    try:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError as error:
        raise _cant_write(path, error) from error


def _cant_write(path: Path, error: OSError) -> BulkError:
    return BulkError(
        f"{path} can't be written: {error.strerror or error}; what is done is kept: see to it, then run the same "
        "command again"
    )


def digest_of(values: Any) -> str:
    """The hex sha256 of JSON values, for a progress file that shall not repeat them all."""
    import hashlib

    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
