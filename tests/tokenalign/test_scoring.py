"""From rows to logits and alignments, against the plain definition."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tokenalign.config import ModelConfig
from tokenalign.errors import NumericalError
from tokenalign.head import AlignmentHead
from tokenalign.labels import LabelSet
from tokenalign.scoring import Aligner, DocumentKeys, LabelQueries
from tokenalign.text import TokenizedTexts
from tokenalign.tokens import TokenBatch

WIDTH = 8
TEMPERATURE = 0.5
LABELS = LabelSet.of(["a", {"name": "b", "description": ["b one", "b two", "b three"]}, "c"])
LABEL_LENGTHS = [2, 3, 1, 2, 4]
DOCUMENT_LENGTHS = [3, 1, 5]


@pytest.fixture(scope="module")
def aligner() -> Aligner:
    """An aligner of a random head."""
    torch.manual_seed(0)
    values = {"backbone": {"reference": "none"}, "backbone_width": 12, "width": WIDTH, "heads": 2, "ffn_width": 16}
    return Aligner(AlignmentHead(ModelConfig.parse(values)), TEMPERATURE)


def unit(count: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=-1)


def queries(dtype: Any = np.float32) -> LabelQueries:
    return LabelQueries(unit(sum(LABEL_LENGTHS), 1).numpy().astype(dtype), np.array(LABEL_LENGTHS, dtype=np.int32))


def keys() -> DocumentKeys:
    return DocumentKeys(unit(sum(DOCUMENT_LENGTHS), 2), np.array(DOCUMENT_LENGTHS, dtype=np.int32))


def tokenized() -> TokenizedTexts:
    """Descriptions whose token t of description d has the span (10 d + t, 10 d + t + 1)."""
    spans = [[10 * d + t, 10 * d + t + 1] for d, n in enumerate(LABEL_LENGTHS) for t in range(n)]
    tokens = sum(LABEL_LENGTHS)
    batch = TokenBatch(np.arange(tokens), np.array(LABEL_LENGTHS, dtype=np.int32), np.ones(tokens, dtype=np.bool_))
    return TokenizedTexts(batch, np.array(spans, dtype=np.int32), (None,) * len(LABEL_LENGTHS))


def expected_logit(description: int, document: int) -> float:
    """scale / temperature · mean_i max_j, with the start scale of 10."""
    label = torch.split(torch.from_numpy(queries().values), LABEL_LENGTHS)[description].tolist()
    text = torch.split(keys().values, DOCUMENT_LENGTHS)[document].tolist()
    best = [max(sum(q * k for q, k in zip(row, other, strict=True)) for other in text) for row in label]
    return float(10 / TEMPERATURE * sum(best) / len(best))


def test_logits_are_the_definition(aligner: Aligner) -> None:
    """Scaled, divided by the temperature, the largest among a label's descriptions."""
    got = aligner.logits(LABELS, queries(), keys())
    descriptions = [[0], [1, 2, 3], [4]]
    expected = [[max(expected_logit(d, b) for d in ds) for ds in descriptions] for b in range(3)]
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_rows_from_a_cache_may_be_read_only_and_fp16(aligner: Aligner) -> None:
    """What comes from another process is scored as it is, without a warning, up to its own rounding."""
    half = queries(np.float16)
    for array in (half.values, half.lengths):
        array.setflags(write=False)
    np.testing.assert_allclose(
        aligner.logits(LABELS, half, keys()), aligner.logits(LABELS, queries(), keys()), atol=2e-2
    )


@pytest.mark.parametrize("limit", [1, 13, 50, 10**9])
def test_memory_is_bounded_without_changing_scores(
    aligner: Aligner, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """However few cosines are held at a time, the logits are the same."""
    expected = aligner.logits(LABELS, queries(), keys())
    monkeypatch.setattr("tokenalign.scoring.MAX_SIMILARITIES", limit)
    np.testing.assert_allclose(aligner.logits(LABELS, queries(), keys()), expected, atol=1e-5)


@given(st.lists(st.integers(1, 6), max_size=8), st.integers(1, 12))
def test_parts_cover_all_documents_within_the_limit(lengths: list[int], limit: int) -> None:
    """In order, none twice, each run within the limit unless it is one document."""
    whole = DocumentKeys(torch.arange(sum(lengths))[:, None], np.array(lengths, dtype=np.int32))
    parts = list(whole.parts(limit))
    assert torch.cat([part.values for part in parts]).tolist() == whole.values.tolist()
    assert [n for part in parts for n in part.lengths.tolist()] == lengths
    for part in parts:
        assert len(part.values) == part.lengths.sum()
        assert len(part.lengths) == 1 or len(part.values) <= limit


@pytest.mark.parametrize("document", [0, 1, 2])
@pytest.mark.parametrize("label", [0, 1, 2])
def test_alignment_explains_the_logit(aligner: Aligner, label: int, document: int) -> None:
    """Contributions sum to the label's logit; the description shown is the one that gave it; spans are its own."""
    rows = keys().slice(document)
    alignment = aligner.align(LABELS, label, tokenized(), queries(), rows)
    logits = aligner.logits(LABELS, queries(), keys())[document]
    assert alignment.contribution.sum() == pytest.approx(logits[label], abs=1e-4)
    own = [d for d, owner in enumerate(LABELS.owners) if owner == label]
    assert alignment.description == max(own, key=lambda d: expected_logit(d, document))
    d, n = alignment.description, LABEL_LENGTHS[alignment.description]
    assert alignment.label_spans.tolist() == [[10 * d + t, 10 * d + t + 1] for t in range(n)]
    start = sum(LABEL_LENGTHS[:d])
    sims = torch.from_numpy(queries().values)[start : start + n] @ rows.T
    assert alignment.key_index.tolist() == sims.argmax(dim=1).tolist()
    np.testing.assert_allclose(alignment.similarity, sims.amax(dim=1), atol=1e-6)
    np.testing.assert_allclose(alignment.median, sims.median(dim=1).values, atol=1e-6)


def test_of_equal_descriptions_the_first_is_shown(aligner: Aligner) -> None:
    """A tie is settled in the caller's order."""
    rows = unit(2, 3).numpy()
    equal = LabelQueries(np.concatenate([rows] * 5), np.full(5, 2, dtype=np.int32))
    ids = TokenBatch(np.arange(10), np.full(5, 2, dtype=np.int32), np.ones(10, dtype=np.bool_))
    texts = TokenizedTexts(ids, np.zeros((10, 2), dtype=np.int32), (None,) * 5)
    assert aligner.align(LABELS, 1, texts, equal, keys().slice(0)).description == 1


def test_select_and_slice_keep_rows_with_their_texts() -> None:
    """Ragged rows are picked as lists would be."""
    some, documents = queries(), keys()
    parts = np.split(some.values, np.cumsum(LABEL_LENGTHS)[:-1])
    chosen = some.select([3, 0, 3])
    assert len(chosen) == 3
    assert chosen.values.tolist() == np.concatenate([parts[3], parts[0], parts[3]]).tolist()
    texts = torch.split(documents.values, DOCUMENT_LENGTHS)
    assert torch.equal(documents.slice(2), texts[2])
    assert torch.equal(documents.select([2, 0]).values, torch.cat([texts[2], texts[0]]))
    assert documents.select([2, 0]).lengths.tolist() == [5, 3]
    assert documents.select([0, 1, 2]) is documents


def test_merged_sequences_score_as_their_union(aligner: Aligner) -> None:
    """Windows of a text are one document: each label token takes its best match over all of them."""
    merged = keys().merged(np.array([2, 1], dtype=np.int32))
    assert merged.lengths.tolist() == [4, 5]
    whole = DocumentKeys(keys().values[:4], np.array([4], dtype=np.int32))
    expected = aligner.logits(LABELS, queries(), whole)
    np.testing.assert_allclose(aligner.logits(LABELS, queries(), merged)[:1], expected, atol=1e-5)
    apart = keys()
    assert apart.merged(np.ones(3, dtype=np.int32)) is apart


def test_both_sides_come_from_projected_rows(aligner: Aligner) -> None:
    """Only kept tokens get rows, of unit length; the label side is ready for a cache."""
    rows = aligner.project(torch.randn(6, 12), "texts")
    keep = np.array([False, True, True, True, False, True])
    batch = TokenBatch(rows, np.array([4, 2], dtype=np.int32), keep)
    label_side, document_side = aligner.label_queries(batch), aligner.document_keys(batch)
    assert label_side.lengths.tolist() == document_side.lengths.tolist() == [3, 1]
    assert label_side.values.dtype == np.float16
    assert document_side.values.dtype == torch.float32
    np.testing.assert_allclose(np.linalg.norm(label_side.values.astype(np.float32), axis=1), 1, atol=2e-3)
    np.testing.assert_allclose(document_side.values.norm(dim=1), 1, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_are_refused(aligner: Aligner, value: float) -> None:
    """A bad vector is never kept or scored."""
    with pytest.raises(NumericalError, match="texts"):
        aligner.project(torch.full((2, 12), value), "texts")


def test_the_head_is_frozen(aligner: Aligner) -> None:
    """Scoring builds no graph, so memory stays flat."""
    assert not aligner.document_keys(
        TokenBatch(np.zeros((1, WIDTH), dtype=np.float32), np.array([1], dtype=np.int32), np.ones(1, dtype=np.bool_))
    ).values.requires_grad
