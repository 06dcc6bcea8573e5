"""Windows of rows through a classifier, and answers as lines of JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenalign.bulk.reading import Window
from tokenalign.bulk.rows import BadRow, Row, snippet
from tokenalign.errors import InputError
from tokenalign.labels import LabelSet
from tokenalign.results import Classification, Explain


class DocumentTokenizer(Protocol):
    """What tells which text has no token."""

    def documents(self, texts: Sequence[str], /) -> object:
        """Anything; `InputError` at `("texts", i)` for a text that can't be read."""


class Classifier(Protocol):
    """What a bulk run needs of a `TokenAlignClassifier`."""

    fingerprint: str

    @property
    def tokenizer(self) -> DocumentTokenizer:
        """The tokenizer of its texts."""

    def __call__(
        self,
        texts: Sequence[str],
        labels: LabelSet,
        /,
        *,
        explain: Explain,
        top_k: int | None,
        max_batch_tokens: int,
    ) -> list[Classification]:
        """One answer for each text, in order."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every row. scores: whether lines list the scores, of the `top_k` best labels if that is set.

    several: whether answers have `labels`, of which a text may get any number: those of a linear head
    """

    labels: LabelSet
    explain: Explain = False
    scores: bool = False
    top_k: int | None = None
    max_batch_tokens: int = 8_192
    several: bool = False

    @property
    def wanted(self) -> int | None:
        """How many labels of an answer are used."""
        return self.top_k if self.scores or self.explain == "all" else 1


@dataclass(frozen=True, slots=True)
class Answered:
    """The rows of a window, in order, with their answers, and those that were bad."""

    good: list[tuple[Row, Classification]]
    bad: list[BadRow]


@dataclass(frozen=True, slots=True)
class Lines:
    """What a window adds to the output and to the side file: whole lines of UTF-8, and how many."""

    good: bytes
    bad: bytes
    good_rows: int
    bad_rows: int


def answer(classifier: Classifier, window: Window, question: Question) -> Answered:
    """The answers of a window, in one call; a text that the tokenizer can't read is a bad row."""
    bad = [row for row in window.rows if isinstance(row, BadRow)]
    rows = [row for row in window.rows if isinstance(row, Row)]
    try:
        answers = _ask(classifier, rows, question)
    except InputError as error:
        if error.loc[:1] != ("texts",):
            raise
        # Looked at one by one: each call would tell only the first.
        unreadable = [_unreadable(classifier, row) for row in rows]
        bad += [row for row in unreadable if row is not None]
        rows = [row for row, problem in zip(rows, unreadable, strict=True) if problem is None]
        answers = _ask(classifier, rows, question)
    return Answered(list(zip(rows, answers, strict=True)), sorted(bad, key=lambda row: row.number))


def render(answered: Answered, question: Question) -> Lines:
    """One line for each row."""
    return Lines(
        _lines([_good(row, found, question) for row, found in answered.good]),
        _lines([{"row": row.number, "reason": row.reason, "raw": row.raw} for row in answered.bad]),
        len(answered.good),
        len(answered.bad),
    )


def _ask(classifier: Classifier, rows: list[Row], question: Question) -> list[Classification]:
    if not rows:
        return []
    return classifier(
        [row.text for row in rows],
        question.labels,
        explain=question.explain,
        top_k=question.wanted,
        max_batch_tokens=question.max_batch_tokens,
    )


def _unreadable(classifier: Classifier, row: Row) -> BadRow | None:
    try:
        classifier.tokenizer.documents([row.text])
    except InputError as error:
        return BadRow(row.number, f"the text {error.message}", snippet(row.text))
    return None


def _good(row: Row, found: Classification, question: Question) -> dict[str, Any]:
    line: dict[str, Any] = {"row": row.number}
    if row.id is not None:
        line["id"] = row.id
    line |= {"label": found["label"], "score": found["score"]}
    if question.several:
        line["labels"] = dict(found)["labels"]
    if question.scores:
        line["scores"] = found["scores"]
    line["truncation"] = found["truncation"]
    if "matches" in found:
        line["matches"] = found["matches"]
    return line


def _lines(objects: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(one, ensure_ascii=False, allow_nan=False)}\n" for one in objects).encode()
