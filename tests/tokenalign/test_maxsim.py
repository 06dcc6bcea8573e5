"""The fast MaxSim against loops that follow the definition word by word."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tokenalign.maxsim import (
    best_description,
    best_per_document,
    capped_scale,
    matches,
    maxsim,
    mean_per_label,
    similarities,
)

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def unit_rows(lengths: list[int], seed: int, width: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [F.normalize(torch.randn(n, width, generator=generator, dtype=torch.float64), dim=-1) for n in lengths]


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def triple_loop(labels: list[Tensor], documents: list[Tensor]) -> list[list[float]]:
    """mean_i max_j q[c,i]·k[b,j], for each document b and description c, in plain Python."""
    table = []
    for document in documents:
        row = []
        for label in labels:
            total = 0.0
            for query in label.tolist():
                best = -float("inf")
                for key in document.tolist():
                    best = max(best, sum(q * k for q, k in zip(query, key, strict=True)))
                total += best
            row.append(total / len(label))
        table.append(row)
    return table


def fast(labels: list[Tensor], documents: list[Tensor]) -> list[list[float]]:
    lengths = [torch.tensor([len(rows) for rows in side]) for side in (labels, documents)]
    table: list[list[float]] = maxsim(torch.cat(labels), lengths[0], torch.cat(documents), lengths[1]).tolist()
    return table


def close(got: list[list[float]], expected: list[list[float]]) -> None:
    assert len(got) == len(expected)
    for row, expected_row in zip(got, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-12)


@given(LENGTHS, LENGTHS, st.integers(0, 2**31))
def test_fast_path_is_the_triple_loop(label_lengths: list[int], document_lengths: list[int], seed: int) -> None:
    """Ragged lengths on both sides, any similarities."""
    labels, documents = unit_rows(label_lengths, seed), unit_rows(document_lengths, seed + 1)
    close(fast(labels, documents), triple_loop(labels, documents))


def test_negative_similarities_stay_negative() -> None:
    """No padding is among the candidates of the maximum, so zero never beats what is below it."""
    labels = [rows([1, 0], [0, 1])]
    documents = [rows([-1, 0], [-0.6, -0.8]), rows([-0.8, -0.6])]
    close(fast(labels, documents), [[(-0.6 + 0.0) / 2], [(-0.8 - 0.6) / 2]])
    close(fast(labels, documents), triple_loop(labels, documents))


def test_one_token_each() -> None:
    """A single label token and a single document token give their cosine."""
    close(fast([rows([0.6, 0.8])], [rows([0.8, 0.6])]), [[0.96]])


def test_neighbours_do_not_matter() -> None:
    """A document scored with others gets what it gets alone."""
    labels, documents = unit_rows([3, 1, 4], 1), unit_rows([2, 9, 1], 2)
    together = fast(labels, documents)
    for i, document in enumerate(documents):
        close(fast(labels, [document]), [together[i]])


def test_similarities_are_all_dot_products() -> None:
    """Document tokens are rows, label tokens are columns."""
    queries, keys = unit_rows([3, 4], 3)
    assert torch.allclose(similarities(queries, keys), torch.einsum("qd,kd->kq", queries, keys))


@pytest.mark.parametrize("lengths", [[0], [2, 0], [0, 2]])
def test_a_side_without_tokens_is_refused(lengths: list[int]) -> None:
    """A maximum or a mean over nothing would be NaN; the error names which one has no token."""
    sims = torch.zeros(sum(lengths), 2)
    with pytest.raises(ValueError, match=f"document {lengths.index(0)} has no token"):
        best_per_document(sims, torch.tensor(lengths))
    with pytest.raises(ValueError, match=f"label {lengths.index(0)} has no token"):
        mean_per_label(sims.T, torch.tensor(lengths))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(0, 2**31))
def test_best_description_is_the_largest_of_a_labels(counts: list[int], seed: int) -> None:
    """Each label's logit is the largest of its descriptions', negative ones too."""
    owners = [label for label, count in enumerate(counts) for _ in range(count)]
    logits = torch.randn(3, len(owners), generator=torch.Generator().manual_seed(seed)) - 2
    expected = [
        [max(row[d] for d in range(len(owners)) if owners[d] == label) for label in range(len(counts))]
        for row in logits.tolist()
    ]
    assert best_description(logits, torch.tensor(owners), len(counts)).tolist() == expected


@pytest.mark.parametrize(("log_scale", "scale"), [(0.0, 1.0), (4.0, 54.598), (4.7, 100.0), (50.0, 100.0)])
def test_scale_is_capped(log_scale: float, scale: float) -> None:
    """exp(log_scale), never above 100."""
    assert float(capped_scale(torch.tensor(log_scale))) == pytest.approx(scale, rel=1e-4)


def test_matches_point_at_the_best_key() -> None:
    """For every label token: where the best is, how good it is, and the median beside it."""
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    keys = torch.tensor([[0.6, 0.8], [1.0, 0.0], [0.0, -1.0]])
    found = matches(queries, keys)
    assert found.key_index.tolist() == [1, 0]
    assert found.similarity.tolist() == pytest.approx([1.0, 0.8])
    assert found.median.tolist() == pytest.approx([0.6, 0.0])
