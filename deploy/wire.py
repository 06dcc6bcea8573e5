"""What crosses a process: frozen dataclasses of numpy arrays, each with its producer's fingerprint."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.trail import NO_TRAIL, Trail
from tokenalign.abstention import Abstention, Thresholds
from tokenalign.backbone import BackboneIdentity
from tokenalign.errors import FingerprintMismatchError, TokenAlignError
from tokenalign.labels import Label, LabelSet
from tokenalign.results import Explain, FloatArray, LabelAlignment, Warning_
from tokenalign.tokens import BoolArray, IntArray, TokenBatch, offsets_of

NO_THRESHOLDS = Thresholds()


class ReplicaLostError(TokenAlignError):
    """A replica ended, or could not be reached, before it answered; the work may be sent once more."""


class Priority(IntEnum):
    """Documents have a caller waiting for each; labels are encoded behind them."""

    DOCUMENTS = 0
    LABELS = 1


@dataclass(frozen=True, slots=True)
class EncoderIdentity:
    """What an encoder replica serves, told once to those that send to it.

    backbone: what its numbers depend on; fingerprint: of the whole model as the encoder sees it, with its default head
    others: fingerprints of the models that its other heads make of the same encoder
    """

    backbone: BackboneIdentity
    fingerprint: str
    others: tuple[str, ...] = ()

    def check_serves(self, fingerprint: str) -> None:
        """Raise `FingerprintMismatchError` unless the encoder serves that model."""
        if fingerprint not in self.others:
            check_fingerprint("the encoder", fingerprint, self.fingerprint)


@dataclass(frozen=True, slots=True, eq=False)
class EncodeBatch:
    """Token ids on their way to an encoder.

    ids: `[tokens]` int32, lengths: `[sequences]` int32
    queued_tokens: tokens that wait in the sender behind this batch; the encoder tells the autoscaler
    trail: whose tokens they are
    """

    fingerprint: str
    ids: IntArray
    lengths: IntArray
    priority: Priority
    queued_tokens: int
    trail: Trail = NO_TRAIL

    @classmethod
    def of(
        cls,
        fingerprint: str,
        tokens: TokenBatch,
        priority: Priority,
        queued_tokens: int = 0,
        trail: Trail = NO_TRAIL,
    ) -> "EncodeBatch":
        """The batch that asks for the rows of `tokens`."""
        ids = tokens.values.astype(np.int32, copy=False)
        return cls(fingerprint, ids, tokens.lengths, priority, queued_tokens, trail)

    def tokens(self) -> TokenBatch:
        """The ids as a `TokenBatch`; the keep mask stays with the sender, so every token counts here."""
        return TokenBatch(self.ids, self.lengths, np.ones(len(self.ids), dtype=np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRows:
    """Rows of an `EncodeBatch`: `[tokens, width]` fp16, or fp32 where fp16 would overflow.

    projected: whether they have passed the head's projection; each batch says so, since a rollout may change it
    """

    fingerprint: str
    values: NDArray[Any]
    lengths: IntArray
    projected: bool


@dataclass(frozen=True, slots=True)
class PackedLabels:
    """A label set as bytes: packed once however often it is sent, and unpacked only by who doesn't know its key.

    key: sha256 of `data`, which is JSON: `[[name, [description, …]], …]`
    """

    key: bytes
    data: bytes

    @classmethod
    def of(cls, labels: LabelSet) -> "PackedLabels":
        """The packed form of a set."""
        data = json.dumps([[label.name, label.descriptions] for label in labels.labels]).encode("ascii")
        return cls(sha256(data).digest(), data)

    def unpack(self) -> LabelSet:
        """The set, equal to the one that was packed."""
        return LabelSet(tuple(Label(name, tuple(descriptions)) for name, descriptions in json.loads(self.data)))


@dataclass(frozen=True, slots=True)
class AskedLabels:
    """A label set within a `ScoreBatch`, and how its rows are come by.

    template: words around each description instead of the model's own, or None
    tenant: whose cache entries it may use; None for those that all share
    keep: False has its rows encoded for this batch alone: neither looked up nor kept anywhere
    """

    labels: PackedLabels
    template: str | None = None
    tenant: str | None = None
    keep: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One text against one label set, within a `ScoreBatch`.

    document: position among the batch's documents; labels: position among its label sets
    multi_label: asks for independent scores; thresholds: below which the answer abstains
    """

    document: int
    labels: int
    explain: Explain
    top_k: int | None
    multi_label: bool = False
    thresholds: Thresholds = NO_THRESHOLDS


@dataclass(frozen=True, slots=True, eq=False)
class ScoreBatch:
    """Token ids on their way to a scorer, which has them encoded, and who asks what of them.

    keep: `[tokens]` bool, which of the documents' tokens are scored
    counts: `[documents]` int32, how many consecutive sequences each document is: its windows, or 1
    """

    documents: EncodeBatch
    keep: BoolArray
    counts: IntArray
    label_sets: tuple[AskedLabels, ...]
    questions: tuple[Question, ...]

    @property
    def fingerprint(self) -> str:
        """Of the sender's model."""
        return self.documents.fingerprint

    @property
    def trail(self) -> Trail:
        """Whose questions they are."""
        return self.documents.trail


@dataclass(frozen=True, slots=True, eq=False)
class LabelReport:
    """What is told of a label set besides scores: how many descriptions were cached, and warnings."""

    cached: int
    warnings: tuple[Warning_, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The answer to one `Question`: its labels, best first, and the alignments asked for.

    fingerprint: of the model that gave it; the texts of one request may travel in batches before and after a rollout
    order: `[k]` int32 positions among the set's labels; scores, logits: `[k]` fp32 of each
    abstained: why the best label is not to be named, by the question's thresholds
    """

    fingerprint: str
    order: IntArray
    scores: FloatArray
    logits: FloatArray
    alignments: tuple[LabelAlignment, ...]
    report: LabelReport
    abstained: Abstention | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """One `Answer`, or the error that concerns it alone, for each question, in order; their arrays laid end to end.

    counts: `[questions]` int32, labels in each answer
    others: of each question, what is no array: an answer's alignments, report and abstention, or an error
    """

    fingerprint: str
    counts: IntArray
    order: IntArray
    scores: FloatArray
    logits: FloatArray
    others: tuple[tuple[tuple[LabelAlignment, ...], LabelReport, Abstention | None] | TokenAlignError, ...]

    @classmethod
    def of(cls, fingerprint: str, answers: Sequence[Answer | TokenAlignError]) -> "ScoredBatch":
        """The packed form of answers, all of one model."""
        good = [answer for answer in answers if isinstance(answer, Answer)]
        return cls(
            fingerprint,
            np.array([len(a.order) if isinstance(a, Answer) else 0 for a in answers], dtype=np.int32),
            np.concatenate([np.zeros(0, dtype=np.int32), *(answer.order for answer in good)]),
            np.concatenate([np.zeros(0, dtype=np.float32), *(answer.scores for answer in good)]),
            np.concatenate([np.zeros(0, dtype=np.float32), *(answer.logits for answer in good)]),
            tuple((a.alignments, a.report, a.abstained) if isinstance(a, Answer) else a for a in answers),
        )

    def answers(self) -> list[Answer | TokenAlignError]:
        """One for each question, in order; their arrays are views."""
        found: list[Answer | TokenAlignError] = []
        for other, start, end in zip(self.others, *_bounds(self.counts), strict=True):
            if isinstance(other, TokenAlignError):
                found.append(other)
            else:
                run = slice(start, end)
                found.append(Answer(self.fingerprint, self.order[run], self.scores[run], self.logits[run], *other))
        return found


def _bounds(counts: IntArray) -> tuple[list[int], list[int]]:
    offsets = offsets_of(counts).tolist()
    return offsets[:-1], offsets[1:]


def check_fingerprint(what: str, expected: str, got: str) -> None:
    """Raise `FingerprintMismatchError` unless both sides hold the same model."""
    if expected != got:
        raise FingerprintMismatchError(what, expected[:12], got[:12])
