"""Packed sequences: groups, runs of equal lengths, and attention against plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tokenalign.packing import Packing, packed_attention, packed_groups

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def packing_of(lengths: list[int]) -> Packing:
    return Packing.of(np.array(lengths, dtype=np.int32), CPU)


def loop_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool, scale: float) -> Tensor:
    """Softmax attention sequence by sequence, head by head, token by token."""
    out, share = torch.zeros_like(q), q.shape[1] // k.shape[1]
    start = 0
    for length in lengths:
        for i in range(start, start + length):
            end = i + 1 if causal else start + length
            for h in range(q.shape[1]):
                weights = torch.softmax(k[start:end, h // share] @ q[i, h] * scale, dim=0)
                out[i, h] = weights @ v[start:end, h // share]
        start += length
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
@given(lengths=LENGTHS, seed=st.integers(0, 2**31))
def test_attention_is_the_loop(causal: bool, key_heads: int, lengths: list[int], seed: int) -> None:
    """Each token sees its own sequence, or what of it came before; several heads may share keys and values."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64)
        for heads in (4, key_heads, key_heads)
    )
    got = packed_attention(q, k, v, packing_of(lengths), causal=causal, scale=0.5)
    torch.testing.assert_close(got, loop_attention(q, k, v, lengths, causal, 0.5), atol=1e-12, rtol=1e-9)


def test_neighbours_of_equal_length_are_one_run() -> None:
    """Runs follow the order of the sequences; empty ones have no rows and are in none."""
    packing = packing_of([2, 2, 5, 2, 0, 0, 7])
    assert packing.runs == ((2, 2), (1, 5), (1, 2), (1, 7))
    assert packing.offsets.tolist() == [0, 2, 4, 9, 11, 11, 11, 18]
    assert packing.offsets.dtype == torch.int32
    assert packing.longest == 7


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 200))
def test_groups_cover_all_within_the_budget(lengths: list[int], budget: int) -> None:
    """Every sequence is in one group, shorter ones first; a group fits, unless it is one long sequence."""
    groups = [group.tolist() for group in packed_groups(np.array(lengths, dtype=np.int32), budget)]
    order = [i for group in groups for i in group]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths)
    assert all(groups)
    assert all(len(group) == 1 or sum(lengths[i] for i in group) <= budget for group in groups)


def test_groups_are_as_large_as_fits() -> None:
    """A group ends only where the next sequence would exceed the budget."""
    groups = packed_groups(np.array([3, 3, 3, 3, 9], dtype=np.int32), 6)
    assert [group.tolist() for group in groups] == [[0, 1], [2, 3], [4]]
