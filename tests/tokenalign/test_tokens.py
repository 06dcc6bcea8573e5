"""Ragged arrays against plain Python lists."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenalign.errors import NumericalError
from tokenalign.tokens import (
    TokenBatch,
    compact,
    length_groups,
    offsets_of,
    ragged_positions,
    segment_counts,
)

Run = list[tuple[int, bool]]
RUNS = st.lists(st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=6), max_size=8)


def batch_of(runs: list[Run]) -> TokenBatch:
    return TokenBatch(
        np.array([value for run in runs for value, _ in run], dtype=np.int32),
        np.array([len(run) for run in runs], dtype=np.int32),
        np.array([kept for run in runs for _, kept in run], dtype=np.bool_),
    )


def runs_of(batch: TokenBatch) -> list[Run]:
    runs, start = [], 0
    for length in batch.lengths.tolist():
        run = slice(start, start + length)
        runs.append(list(zip(batch.values[run].tolist(), batch.keep[run].tolist(), strict=True)))
        start += length
    return runs


@given(RUNS)
def test_offsets_bound_each_run(runs: list[Run]) -> None:
    """Sequence i lies between offset i and offset i + 1."""
    batch = batch_of(runs)
    bounds = batch.offsets
    assert [batch.values[a:b].tolist() for a, b in pairwise(bounds)] == [[value for value, _ in run] for run in runs]
    assert len(batch) == len(runs)


@given(RUNS, st.data())
def test_select_is_list_indexing(runs: list[Run], data: st.DataObject) -> None:
    """Any indices, repeated and in any order, empty runs included."""
    indices = data.draw(st.lists(st.integers(0, len(runs) - 1), max_size=6)) if runs else []
    assert runs_of(batch_of(runs).select(indices)) == [runs[i] for i in indices]


@given(RUNS)
def test_kept_filters_each_run(runs: list[Run]) -> None:
    """Every sequence stays, with the tokens that are scored."""
    assert runs_of(batch_of(runs).kept()) == [[token for token in run if token[1]] for run in runs]


@given(st.lists(RUNS, min_size=1, max_size=4))
def test_concat_is_list_addition(groups: list[list[Run]]) -> None:
    """All sequences of all batches, in order."""
    assert runs_of(TokenBatch.concat([batch_of(runs) for runs in groups])) == [run for runs in groups for run in runs]


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=6))
def test_segment_counts_count_empty_runs_as_zero(runs: list[list[bool]]) -> None:
    """The sum of each run, also where runs are empty, at the end too."""
    flags = np.array([flag for run in runs for flag in run], dtype=np.bool_)
    assert segment_counts(flags, offsets_of(np.array([len(run) for run in runs], dtype=np.int32))).tolist() == [
        sum(run) for run in runs
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=6))
def test_ragged_positions_are_ranges(pairs: list[tuple[int, int]]) -> None:
    """The runs' ranges, one behind the other."""
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    lengths = np.array([length for _, length in pairs], dtype=np.int32)
    assert ragged_positions(starts, lengths).tolist() == [i for s, n in pairs for i in range(s, s + n)]


def test_vectors_stay_with_their_tokens() -> None:
    """Values may be rows; selecting moves whole rows."""
    batch = batch_of([[(1, True)], [(2, True), (3, False)]])
    rows = batch.with_values(np.arange(6, dtype=np.float32).reshape(3, 2))
    assert rows.select([1, 0]).values.tolist() == [[2, 3], [4, 5], [0, 1]]
    assert rows.kept().values.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("values", "lengths", "keep"),
    [([1, 2], [1], [True]), ([1], [1], [True, False]), ([1, 2], [2], [True]), ([1], [[1]], [True])],
)
def test_arrays_that_do_not_fit_are_refused(values: list[int], lengths: list[int], keep: list[bool]) -> None:
    """A batch can't exist with a token too many or too few."""
    with pytest.raises(ValueError, match="don't fit"):
        TokenBatch(np.array(values), np.array(lengths, dtype=np.int32), np.array(keep))


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 200))
def test_length_groups_cover_all_within_the_budget(lengths: list[int], budget: int) -> None:
    """Every sequence is in one group; a group's padded size fits, unless it is one long sequence alone."""
    groups = [group.tolist() for group in length_groups(np.array(lengths, dtype=np.int32), budget)]
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(groups)
    for group in groups:
        padded = max(lengths[i] for i in group) * len(group)
        assert len(group) == 1 or padded <= budget
        assert len(group) == 1 or 4 * (padded - sum(lengths[i] for i in group)) <= padded


def test_compact_chooses_the_smaller_dtype_that_holds_the_values() -> None:
    """fp16 up to its largest value, fp32 above it."""
    assert compact(np.array([65_504.0, -1.0], dtype=np.float32), "rows").dtype == np.float16
    large = compact(np.array([70_000.0], dtype=np.float32), "rows")
    assert large.dtype == np.float32
    assert large.tolist() == [70_000.0]
    assert compact(np.zeros((0, 4), dtype=np.float32), "rows").shape == (0, 4)


@pytest.mark.parametrize("value", [65_519.0, -65_519.0, 65_505.0])
def test_compact_never_makes_infinity(value: float) -> None:
    """A value between fp16's largest and its rounding bound is kept finite."""
    assert np.isfinite(compact(np.array([value], dtype=np.float32), "rows")).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_compact_refuses_what_is_no_number(value: float) -> None:
    """NaN and infinity are an error that names the rows."""
    with pytest.raises(NumericalError, match="texts"):
        compact(np.array([0.0, value], dtype=np.float32), "texts")
