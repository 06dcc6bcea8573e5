"""What crosses a process: frozen dataclasses of numpy arrays, each with its producer's fingerprint."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.backbone import BackboneIdentity
from tokenalign.errors import FingerprintMismatchError, TokenAlignError
from tokenalign.labels import LabelSet
from tokenalign.results import Explain, FloatArray, LabelAlignment, Warning_
from tokenalign.tokens import BoolArray, IntArray, TokenBatch


class ReplicaLostError(TokenAlignError):
    """A replica ended, or could not be reached, before it answered; the work may be sent once more."""


class Priority(IntEnum):
    """Documents have a caller waiting for each; labels are encoded behind them."""

    DOCUMENTS = 0
    LABELS = 1


@dataclass(frozen=True, slots=True)
class EncoderIdentity:
    """What an encoder replica serves, told once to those that send to it.

    backbone: what its numbers depend on; fingerprint: of the whole model as the encoder sees it
    """

    backbone: BackboneIdentity
    fingerprint: str


@dataclass(frozen=True, slots=True, eq=False)
class EncodeBatch:
    """Token ids on their way to an encoder.

    ids: `[tokens]` int32, lengths: `[sequences]` int32
    queued_tokens: tokens that wait in the sender behind this batch; the encoder tells the autoscaler
    """

    fingerprint: str
    ids: IntArray
    lengths: IntArray
    priority: Priority
    queued_tokens: int

    @classmethod
    def of(cls, fingerprint: str, tokens: TokenBatch, priority: Priority, queued_tokens: int = 0) -> "EncodeBatch":
        """The batch that asks for the rows of `tokens`."""
        return cls(fingerprint, tokens.values.astype(np.int32, copy=False), tokens.lengths, priority, queued_tokens)

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


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One text against one label set, within a `ScoreBatch`.

    document: position among the batch's encoded sequences; labels: position among its label sets
    """

    document: int
    labels: int
    explain: Explain
    top_k: int | None


@dataclass(frozen=True, slots=True, eq=False)
class ScoreBatch:
    """What the scorer needs besides the encoded rows: `keep`: `[tokens]` bool, label sets, and who asks what.

    tenants: for each label set whose cache entries it may use; None for those that all share
    """

    fingerprint: str
    keep: BoolArray
    label_sets: tuple[LabelSet, ...]
    tenants: tuple[str | None, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LabelReport:
    """What is told of a label set besides scores: how many descriptions were cached, and warnings."""

    cached: int
    warnings: tuple[Warning_, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The scores of one `Question`: `[labels]` fp32 each, in the caller's order, and the alignments asked for.

    fingerprint: of the model that gave them; the texts of one request may travel in batches before and after a rollout
    """

    fingerprint: str
    logits: FloatArray
    scores: FloatArray
    alignments: tuple[LabelAlignment, ...]
    report: LabelReport


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """One `Answer`, or the error that concerns it alone, for each question, in order."""

    fingerprint: str
    answers: tuple[Answer | TokenAlignError, ...]


def check_fingerprint(what: str, expected: str, got: str) -> None:
    """Raise `FingerprintMismatchError` unless both sides hold the same model."""
    if expected != got:
        raise FingerprintMismatchError(what, expected[:12], got[:12])
