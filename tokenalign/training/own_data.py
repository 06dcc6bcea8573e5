"""A user's own messages: a file of texts and labels, a file of label descriptions, and what is wrong with them."""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenalign.bulk.opening import format_of, open_reader
from tokenalign.bulk.reading import Place, Source
from tokenalign.bulk.rows import BadRow, Columns, Row
from tokenalign.errors import DataError, InputError
from tokenalign.label_files import LabelFile
from tokenalign.labels import LabelSet
from tokenalign.references import sha256_of
from tokenalign.training.data import Corpus, Example, label_words, normalised
from tokenalign.training.splits import Split, SplitKind, make_label_split, make_message_split

SHOWN_ROWS = 5  # bad rows that an error quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFiles:
    """Where a user's data lies, and how it is divided.

    data: JSON Lines, CSV, TSV or Parquet with a column of texts and one of labels, whose names the columns are
    test: messages to test on, in the same form; None: some of `data`'s are
    labels: descriptions, in the form of `LabelFile`; None: each label's name as words describes it
    split: "labels" tests on labels that were never trained on, "messages" on other messages of the same labels
    """

    data: Path
    test: Path | None = None
    labels: Path | None = None
    text_column: str = "text"
    label_column: str = "label"
    split: SplitKind = "labels"


@dataclass(frozen=True, slots=True)
class OwnData:
    """A user's messages, checked.

    corpus: its partition "train" holds the data file's rows, "test" the test file's where there is one
    labels: every label with its descriptions; provenance: what a head keeps of the files
    """

    corpus: Corpus
    labels: LabelSet
    provenance: dict[str, Any]

    @property
    def descriptions(self) -> Mapping[str, tuple[str, ...]]:
        """Label -> its descriptions."""
        return {label.name: label.descriptions for label in self.labels.labels}

    def split(self, kind: SplitKind, seed: int) -> Split:
        """The partitions of `seed`; `DataError` where there are too few labels or messages for them."""
        return make_label_split(self.corpus, seed) if kind == "labels" else make_message_split(self.corpus, seed)


def read_own(files: OwnFiles) -> OwnData:
    """The data of the files; `DataError` names file, row and column of what is wrong, and what to do."""
    examples = {"train": read_examples(files.data, files.text_column, files.label_column)}
    if files.test is not None:
        examples["test"] = read_examples(files.test, files.text_column, files.label_column)
        known = {example.label for example in examples["train"]}
        if strange := sorted({example.label for example in examples["test"]} - known):
            raise DataError(
                f"{files.test}: label {strange[0]!r} does not occur in {files.data}"
                f"{_and_more(len(strange) - 1, 'label')}; both files must use the same labels, written alike"
            )
    names = tuple(dict.fromkeys(example.label for example in examples["train"]))
    labels = _described(names, files)
    paths = {"data": files.data, "test": files.test, "labels": files.labels}
    provenance: dict[str, Any] = {
        name: {"file": path.name, "sha256": sha256_of(path)} for name, path in paths.items() if path is not None
    }
    provenance["columns"] = [files.text_column, files.label_column]
    return OwnData(Corpus(names, examples), labels, provenance)


def read_examples(path: Path, text_column: str = "text", label_column: str = "label") -> tuple[Example, ...]:
    """The messages of a file and their labels; `DataError` quotes its first bad rows.

    Nothing is left out: a row without a text or a label is an error, since who wrote the file can tell what was meant.
    """
    # A label is read where `batch` reads an id: a second column that every row must have.
    source = Source(path, format_of(path), Columns(text_column, label_column))
    by_line = source.format == "jsonl"
    examples: list[Example] = []
    bad: list[str] = []
    for window in open_reader(source).windows(Place()):
        for row in window.rows:
            place = f"{path}, {'line' if by_line else 'row'} {row.number + 1}"
            problem = row.reason if isinstance(row, BadRow) else _label_problem(row, label_column)
            if problem is not None:
                bad.append(f"{place}: {problem}")
            elif isinstance(row, Row):
                examples.append(Example(row.text, str(row.id).strip()))
    if bad:
        shown = "; ".join(bad[:SHOWN_ROWS])
        raise DataError(f"{shown}{_and_more(len(bad) - SHOWN_ROWS, 'bad row')}; correct or remove them")
    if not examples:
        raise DataError(f"{path} has no rows; give a file with a text and a label in each")
    refuse_alike((example.label for example in examples), path)
    return tuple(examples)


def read_texts(path: Path, text_column: str = "text") -> tuple[str, ...]:
    """The texts of a file of the same form whose labels don't matter; `DataError` as for `read_examples`."""
    source = Source(path, format_of(path), Columns(text_column))
    rows = [row for window in open_reader(source).windows(Place()) for row in window.rows]
    bad = [f"{path}, row {row.number + 1}: {row.reason}" for row in rows if isinstance(row, BadRow)]
    if bad or not rows:
        raise DataError(f"{bad[0]}; correct or remove it" if bad else f"{path} has no rows; give a file of texts")
    return tuple(row.text for row in rows if isinstance(row, Row))


def _label_problem(row: Row, column: str) -> str | None:
    if not isinstance(row.id, str):
        return f"{column}: must be a string, not {reprlib.repr(row.id)}; write the label's name in quotes"
    if not row.id.strip():
        return f"{column}: is empty; name the text's label"
    if "\x00" in row.id:
        return f"{column}: has a NUL character; remove it"
    return None


def refuse_alike(names: Iterable[str], path: Path) -> None:
    """Raise `DataError` for two spellings of one label: they would be taken for two labels."""
    spelling: dict[str, str] = {}
    for name in dict.fromkeys(names):
        first = spelling.setdefault(normalised(label_words(name)), name)
        if first != name:
            raise DataError(f"{path}: labels {first!r} and {name!r} read the same; write them alike")


def _described(names: tuple[str, ...], files: OwnFiles) -> LabelSet:
    if files.labels is None:
        if numbers := [name for name in names if name.isdecimal()]:
            raise DataError(
                f"{files.data}: label {numbers[0]!r} is a number, which tells the model nothing"
                f"{_and_more(len(numbers) - 1, 'label')}; label with words, or describe labels with --labels-file"
            )
        described: dict[str, tuple[str, ...]] = {name: (label_words(name),) for name in names}
    else:
        given = LabelFile.read(files.labels).label_set()
        described = {label.name: label.descriptions for label in given.labels}
        if missing := [name for name in names if name not in described]:
            raise DataError(
                f"{files.labels} does not describe label {missing[0]!r}, which {files.data} has"
                f"{_and_more(len(missing) - 1, 'label')}; add a line for each, the name written alike"
            )
    try:
        return LabelSet.of([{"name": name, "description": described[name]} for name in names])
    except InputError as error:
        raise DataError(f"{files.data}: {error}") from error


def _and_more(count: int, what: str) -> str:
    return "" if count <= 0 else f" (and {count:,} more {what}{'' if count == 1 else 's'})"
