"""A classifier that answers at once, and jobs that use it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tokenalign import LabelSet
from tokenalign.bulk.answering import Question
from tokenalign.bulk.opening import format_of
from tokenalign.bulk.output import OutputPaths
from tokenalign.bulk.reading import Source
from tokenalign.bulk.rows import Columns
from tokenalign.bulk.run import Job
from tokenalign.errors import InputError
from tokenalign.results import Classification

LABELS = LabelSet.of(["card", "cash"])


class Instant:
    """Answers from a checksum of the text alone; a zero-width space has no token, as with a real tokenizer."""

    def __init__(self, fingerprint: str = "f" * 64) -> None:
        self.fingerprint = fingerprint
        self.calls: list[int] = []
        self.fails_at: Callable[[Sequence[str]], BaseException | None] = lambda texts: None

    @property
    def tokenizer(self) -> "Instant":
        return self

    def documents(self, texts: Sequence[str], /) -> None:
        for i, text in enumerate(texts):
            if text == "\u200b":
                raise InputError("has no character that the tokenizer can read; send some visible text", ("texts", i))

    def __call__(self, texts: Sequence[str], labels: LabelSet, /, **options: Any) -> list[Classification]:
        if error := self.fails_at(texts):
            raise error
        self.documents(texts)
        self.calls.append(len(texts))
        return [self._answer(text, labels, **options) for text in texts]

    def _answer(self, text: str, labels: LabelSet, **options: Any) -> Classification:
        score = 0.5 + crc32(text.encode()) / 2**33
        scores = dict(zip(labels.names, (score, 1 - score), strict=True))
        kept = dict(list(scores.items())[: options["top_k"]])
        return Classification(label=labels.names[0], score=score, scores=kept, truncation=None, warnings=[])


@pytest.fixture
def instant() -> Instant:
    """A classifier that needs no model."""
    return Instant()


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Makes the job of a file, writing to out.jsonl beside it."""

    def make(path: Path | None, *, overwrite: bool = False, window_rows: int = 8, **question: Any) -> Job:
        columns = Columns("text", question.pop("id_column", None))
        kind = "jsonl" if path is None else format_of(path)
        return Job(
            Source(path, kind, columns, window_rows),
            Question(LABELS, **question),
            OutputPaths.of(tmp_path / "out.jsonl"),
            overwrite,
        )

    return make


@pytest.fixture
def lines_of(tmp_path: Path) -> Callable[[str], list[Any]]:
    """Reads a file of JSON lines in the test's folder; one that is absent has none."""

    def read(name: str) -> list[Any]:
        path = tmp_path / name
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    return read
