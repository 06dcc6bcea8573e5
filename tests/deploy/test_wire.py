"""What crosses a process: it arrives as it was sent, and refuses what is of another model."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deploy.wire import (
    Answer,
    AskedLabels,
    EncodeBatch,
    EncodedRows,
    EncoderIdentity,
    LabelReport,
    PackedLabels,
    Priority,
    Question,
    ReplicaLostError,
    ScoreBatch,
    ScoredBatch,
    check_fingerprint,
)
from tokenalign import LabelSet
from tokenalign.abstention import Abstention, Thresholds
from tokenalign.backbone import BackboneIdentity
from tokenalign.errors import FingerprintMismatchError, InputError, NumericalError
from tokenalign.results import LabelAlignment, Warning_
from tokenalign.tokens import TokenBatch

TOKENS = TokenBatch(np.arange(5, dtype=np.int64), np.array([2, 3], dtype=np.int32), np.array([0, 1, 1, 0, 1], np.bool_))


def test_a_batch_of_ids() -> None:
    """Ids travel as int32 with their lengths, and come out as tokens that all count."""
    batch = EncodeBatch.of("print", TOKENS, Priority.LABELS, queued_tokens=7)
    assert batch.ids.dtype == np.int32
    assert (batch.fingerprint, batch.priority, batch.queued_tokens) == ("print", Priority.LABELS, 7)
    tokens = batch.tokens()
    np.testing.assert_array_equal(tokens.values, TOKENS.values)
    np.testing.assert_array_equal(tokens.lengths, TOKENS.lengths)
    assert tokens.keep.all()


def test_documents_come_before_labels() -> None:
    """A caller waits for each document, so documents have the lower number."""
    assert Priority.DOCUMENTS < Priority.LABELS


def test_all_of_it_crosses_a_process(crossed: Callable[[Any], Any]) -> None:
    """Batches, rows, questions and answers survive pickling, arrays bit for bit and without a copy of their own."""
    labels = LabelSet.of(["a", {"name": "b", "description": ["c", "ü"]}])
    alignment = LabelAlignment(
        1,
        np.zeros((2, 2), np.int32),
        np.arange(2),
        np.ones(2, np.float32),
        np.zeros(2, np.float32),
        np.ones(2, np.float32),
    )
    report = LabelReport(3, (Warning_(loc=["labels", 0], type="truncated", message="…"),))
    order, logits = np.array([1, 0], np.int32), np.array([1.5, -2.0], np.float32)
    answer = Answer("print", order, logits + 1, logits, (alignment,), report)
    low = Abstention(reason="min_score", value=0.1, limit=0.5)
    best = Answer("print", order[:1], logits[:1] + 1, logits[:1], (), report, low)
    received = crossed(ScoredBatch.of("print", (answer, InputError("no", ("labels", 1)), best)))
    first, failed, second = received.answers()
    np.testing.assert_array_equal(first.order, order)
    np.testing.assert_array_equal(first.scores, logits + 1)
    np.testing.assert_array_equal(first.logits, logits)
    np.testing.assert_array_equal(first.alignments[0].key_index, np.arange(2))
    assert not first.logits.flags.writeable
    assert (first.fingerprint, first.report.cached, first.report.warnings) == ("print", 3, report.warnings)
    assert failed.loc == ("labels", 1)
    assert (second.order.tolist(), second.logits.tolist(), second.alignments) == ([1], [1.5], ())
    assert (first.abstained, second.abstained) == (None, low)

    documents = EncodeBatch.of("print", TOKENS, Priority.DOCUMENTS)
    asked = AskedLabels(PackedLabels.of(labels), "about {label}", "somebody", keep=False)
    question = Question(0, 0, "all", None, True, Thresholds(min_margin=0.5))
    batch = crossed(ScoreBatch(documents, TOKENS.keep, np.array([2], np.int32), (asked,), (question,)))
    assert batch.fingerprint == "print"
    assert batch.label_sets == (asked,)
    assert batch.counts.tolist() == [2]
    [arrived] = batch.questions
    assert (arrived.explain, arrived.multi_label, arrived.thresholds) == ("all", True, Thresholds(None, 0.5))

    rows = crossed(EncodedRows("print", np.ones((5, 3), np.float16), TOKENS.lengths, True))
    assert (rows.values.dtype, rows.values.shape, rows.projected) == (np.float16, (5, 3), True)

    identity = EncoderIdentity(BackboneIdentity("ref", None, "a" * 64, "b" * 64, "float32"), "print")
    assert crossed(identity) == identity


def test_packed_labels() -> None:
    """A set comes out of its bytes as it was, names and descriptions in order; other sets have other keys."""
    labels = LabelSet.of(["b", {"name": 'ä, "quoted"', "description": ["c", "\U0001f600"]}, "a"])
    packed = PackedLabels.of(labels)
    assert packed.unpack() == labels
    assert hash(packed.unpack()) == hash(labels)
    others = (["b", "a"], ["a", "b"], ["a,b"], [{"name": "a", "description": "c"}, "b"])
    assert len({PackedLabels.of(LabelSet.of(other, min_labels=1)).key for other in others} | {packed.key}) == 5


@pytest.mark.parametrize(
    "error",
    [
        InputError("is empty", ("texts", 3)),
        FingerprintMismatchError("the rows", "a", "b"),
        NumericalError("NaN"),
        ReplicaLostError("gone"),
    ],
)
def test_errors_cross_a_process(error: Exception) -> None:
    """An error arrives as the same class with the same words, and place where it has one."""
    arrived = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.__dict__ == error.__dict__


def test_fingerprints_are_compared() -> None:
    """Equal ones pass; others are an error that names what it is about and both, shortened."""
    check_fingerprint("the rows", "a" * 64, "a" * 64)
    with pytest.raises(FingerprintMismatchError, match="the rows is of model bbbbbbbbbbbb, this process holds aaaa"):
        check_fingerprint("the rows", "a" * 64, "b" * 64)
