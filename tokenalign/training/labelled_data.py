"""Texts for a linear head: a file of texts, each with one label or with several, and what is wrong with it."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.bulk.opening import format_of, open_reader
from tokenalign.bulk.reading import Place, Source
from tokenalign.bulk.rows import BadRow, Columns, Row
from tokenalign.errors import DataError, InputError
from tokenalign.labels import LabelSet
from tokenalign.linear.config import Mode
from tokenalign.references import sha256_of
from tokenalign.training.own_data import SHOWN_ROWS, refuse_alike

SEPARATOR = "|"  # of the labels in one field of CSV; names such as "Bandwagon,Reductio" hold commas
LABEL, LABELS = "label", "labels"


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text and the names of its labels: one, or any number of them."""

    text: str
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """The labels as one string, the same for every order of them."""
        return json.dumps(sorted(self.labels), ensure_ascii=False)

    @property
    def digest(self) -> str:
        """The hex sha256 of text and labels, each length-prefixed."""
        parts = (self.text.encode(), self.label.encode())
        return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledFiles:
    """Where a user's texts with labels lie.

    data: JSON Lines, CSV, TSV or Parquet; test: texts to test on, in the same form; None: some of `data`'s are
    label_column: of one label a text; labels_column: of several, a list in JSON and Parquet, in CSV joined by "|".
        Neither: "label" or "labels", whichever of them the first row has
    """

    data: Path
    test: Path | None = None
    text_column: str = "text"
    label_column: str | None = None
    labels_column: str | None = None


@dataclass(frozen=True, slots=True)
class LabelledData:
    """A user's texts, checked.

    labels: every name, in the order in which they are first met; test: None where no test file was given
    """

    mode: Mode
    labels: tuple[str, ...]
    texts: tuple[LabelledText, ...]
    test: tuple[LabelledText, ...] | None
    provenance: dict[str, Any]


def read_labelled(files: LabelledFiles) -> LabelledData:
    """The data of the files; `DataError` names file, row and column of what is wrong, and what to do."""
    mode, column = label_column(files)
    texts = read_labelled_texts(files.data, files.text_column, column, mode)
    names = tuple(dict.fromkeys(name for text in texts for name in text.labels))
    refuse_alike(names, files.data)
    try:
        LabelSet.of(names, min_labels=2 if mode == "single_label" else 1)
    except InputError as error:
        raise DataError(f"{files.data}: {error}") from error
    test = None
    if files.test is not None:
        test = read_labelled_texts(files.test, files.text_column, column, mode)
        check_known(test, names, files.test, str(files.data))
    paths = {"data": files.data, "test": files.test}
    provenance: dict[str, Any] = {
        name: {"file": path.name, "sha256": sha256_of(path)} for name, path in paths.items() if path is not None
    }
    provenance["columns"] = [files.text_column, column]
    return LabelledData(mode, names, texts, test, provenance)


def check_known(texts: tuple[LabelledText, ...], names: tuple[str, ...], path: Path, where: str) -> None:
    """Raise `DataError` where the texts of a file have a label that `where` doesn't know."""
    if strange := sorted({name for text in texts for name in text.labels} - set(names)):
        more = f" (and {len(strange) - 1:,} more)" if len(strange) > 1 else ""
        raise DataError(
            f"{path}: label {strange[0]!r} is unknown to {where}{more}; both must use the same labels, written alike"
        )


def label_column(files: LabelledFiles) -> tuple[Mode, str]:
    """What the labels' column says of the task, and its name; `DataError` where the first row doesn't tell."""
    if files.label_column is not None and files.labels_column is not None:
        raise InputError("give the column of one label a text, or that of several, not both", ("labels-column",))
    if files.labels_column is not None:
        return "multi_label", files.labels_column
    if files.label_column is not None:
        return "single_label", files.label_column
    found = [name for name in (LABEL, LABELS) if _has_column(files.data, name)]
    if len(found) != 1:
        raise DataError(
            f"{files.data} has {f'both {LABEL!r} and' if found else f'neither {LABEL!r} nor'} {LABELS!r} as a column; "
            "say which with --label-column (one label a text) or --labels-column (several)"
        )
    return ("single_label", LABEL) if found[0] == LABEL else ("multi_label", LABELS)


def read_labelled_texts(path: Path, text_column: str, column: str, mode: Mode) -> tuple[LabelledText, ...]:
    """The texts of a file and their labels; `DataError` quotes its first bad rows, of which none is left out."""
    source = Source(path, format_of(path), _LabelColumns(text_column, column, several=mode == "multi_label"))
    word = "line" if source.format == "jsonl" else "row"
    texts: list[LabelledText] = []
    bad: list[str] = []
    for window in open_reader(source).windows(Place()):
        for row in window.rows:
            if isinstance(row, BadRow):
                bad.append(f"{path}, {word} {row.number + 1}: {row.reason}")
            else:
                texts.append(LabelledText(row.text, tuple(json.loads(str(row.id)))))
    if bad:
        more = f" (and {len(bad) - SHOWN_ROWS:,} more bad rows)" if len(bad) > SHOWN_ROWS else ""
        raise DataError(f"{'; '.join(bad[:SHOWN_ROWS])}{more}; correct or remove them")
    if not texts:
        raise DataError(f"{path} has no rows; give a file with a text and its labels in each")
    return tuple(texts)


def label_matrix(texts: tuple[LabelledText, ...], names: tuple[str, ...]) -> NDArray[np.bool_]:
    """`[texts, labels]`: which label holds of which text."""
    position = {name: i for i, name in enumerate(names)}
    holds = np.zeros((len(texts), len(names)), dtype=np.bool_)
    for i, text in enumerate(texts):
        holds[i, [position[name] for name in text.labels]] = True
    return holds


@dataclass(frozen=True, slots=True)
class _LabelColumns(Columns):
    """A text and its labels, which travel as JSON where other rows have their id."""

    several: bool = False

    def row(self, number: int, values: Mapping[str, object], raw: str) -> Row | BadRow:
        row = Columns(self.text).row(number, values, raw)
        if isinstance(row, BadRow):
            return row
        column = str(self.id)
        if column not in values:
            return BadRow(number, f"{column}: is missing; the row has {reprlib.repr(list(values))}", raw)
        try:
            names = _several(values[column], column) if self.several else [_name(values[column], column)]
        except InputError as error:
            return BadRow(number, str(error), raw)
        return Row(number, row.text, json.dumps(names, ensure_ascii=False))


def _several(value: object, column: str) -> list[str]:
    parts = [part for part in value.split(SEPARATOR) if part.strip()] if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise InputError(
            f"must be a list of names, or names joined by {SEPARATOR}, not {reprlib.repr(value)}", (column,)
        )
    return list(dict.fromkeys(_name(part, column) for part in parts))


def _name(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"must be a string, not {reprlib.repr(value)}; write the label's name in quotes", (column,))
    if not value.strip():
        raise InputError("is empty; name the text's label", (column,))
    if "\x00" in value:
        raise InputError("has a NUL character; remove it", (column,))
    return value.strip()


def _has_column(path: Path, column: str) -> bool:
    """Whether the first row of a file has the column."""
    try:
        reader = open_reader(Source(path, format_of(path), Columns(column), window_rows=1))
        rows = next(iter(reader.windows(Place()))).rows
    except (DataError, StopIteration):
        return False
    return any(not (isinstance(row, BadRow) and row.reason.startswith(f"{column}: is missing")) for row in rows)
