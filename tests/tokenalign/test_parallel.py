"""Work side by side: even shares, results in order, and nobody else's operators slowed down."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenalign.parallel import SHARED_OPERATORS, ComputePool, operator_threads, operator_threads_for, shards


@given(st.lists(st.integers(1, 128), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 300))
def test_shards_are_all_of_it(lengths: list[int], parts: int, min_tokens: int) -> None:
    """Every sequence is in one share, in order; no more shares than asked for, none of them empty."""
    found = shards(np.array(lengths, dtype=np.int32), parts, min_tokens)
    assert np.concatenate(found).tolist() == list(range(len(lengths)))
    assert 1 <= len(found) <= parts
    assert all(len(share) for share in found)


def test_shards_are_even() -> None:
    """Shares hold about as many tokens each: no more than the longest sequence apart from the mean."""
    lengths = np.random.default_rng(0).integers(4, 60, 200).astype(np.int32)
    sums = [int(lengths[share].sum()) for share in shards(lengths, 4)]
    assert len(sums) == 4
    assert max(abs(tokens - lengths.sum() / 4) for tokens in sums) <= 60


def test_little_work_is_not_shared() -> None:
    """What is below the least size of a share stays whole."""
    assert len(shards(np.full(10, 12, dtype=np.int32), 4, min_tokens=128)) == 1
    assert len(shards(np.full(30, 12, dtype=np.int32), 4, min_tokens=128)) == 2


def test_operator_threads() -> None:
    """The number holds within, in this thread alone, and is as before afterwards, also after an error."""
    before = torch.get_num_threads()

    def fail() -> None:
        with operator_threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before


def test_only_large_passes_share_their_operators() -> None:
    """A small pass is one thread's, a large one everybody's."""
    assert operator_threads_for(SHARED_OPERATORS - 1, 8) == 1
    assert operator_threads_for(SHARED_OPERATORS, 8) == 8


def test_the_pool_computes_on_one_core_each() -> None:
    """Items are computed side by side, on one operator thread each, and their results come in order."""
    pool, before, meet = ComputePool(3), torch.get_num_threads(), threading.Barrier(3)

    def work(item: int) -> tuple[int, int]:
        meet.wait(60)  # passes only when three threads are in here at once
        return item, torch.get_num_threads()

    assert pool.map(work, [5, 6, 7], 0) == [(5, 1), (6, 1), (7, 1)]
    assert torch.get_num_threads() == before


def test_a_thread_made_later_is_as_before() -> None:
    """The pool's threads leave no trace in torch: a thread that is made after them has as many as one before."""
    seen: list[int] = []

    def look() -> None:
        seen.append(torch.get_num_threads())

    def run() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    run()
    ComputePool(2).map(str, [1, 2], 0)
    run()
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("multiply_adds", "threads"), [(0.0, 1), (SHARED_OPERATORS, 2)])
def test_a_single_item_is_computed_here(multiply_adds: float, threads: int) -> None:
    """One item needs no other thread; a large one gets their cores for its operators."""
    found = ComputePool(2).map(lambda item: (threading.get_ident(), torch.get_num_threads()), [0], multiply_adds)
    assert found == [(threading.get_ident(), threads)]


def test_an_error_comes_out() -> None:
    """What a thread raises is raised to the caller, and the pool works on."""
    pool = ComputePool(2)
    with pytest.raises(ZeroDivisionError):
        pool.map(lambda item: 1 // item, [1, 0], 0)
    assert pool.map(lambda item: item, [1, 2], 0) == [1, 2]
