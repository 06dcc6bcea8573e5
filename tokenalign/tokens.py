"""Ragged token arrays: what a text becomes, and what crosses a process boundary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.errors import NumericalError

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """The tokens of several sequences behind each other, without padding.

    values: `[tokens]` token ids, or `[tokens, width]` vectors
    lengths: `[sequences]` int32, tokens of each sequence
    keep: `[tokens]` bool, which tokens are scored; the others are context only
    """

    values: NDArray[Any]
    lengths: IntArray
    keep: BoolArray

    def __post_init__(self) -> None:
        tokens = int(self.lengths.sum())
        if self.lengths.ndim != 1 or self.keep.shape != (tokens,) or self.values.shape[:1] != (tokens,):
            raise ValueError(
                f"ragged arrays don't fit each other: {len(self.lengths)} lengths sum to {tokens} tokens, "
                f"values have shape {self.values.shape}, keep {self.keep.shape}"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """`[sequences + 1]`: sequence i is `values[offsets[i]:offsets[i + 1]]`."""
        return offsets_of(self.lengths)

    def with_values(self, values: NDArray[Any]) -> "TokenBatch":
        """The same sequences with other values, one per token."""
        return TokenBatch(values, self.lengths, self.keep)

    def select(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> "TokenBatch":
        """The sequences at `indices`, in that order."""
        chosen = np.asarray(indices, dtype=np.int64)
        positions = ragged_positions(self.offsets[chosen], self.lengths[chosen])
        return TokenBatch(self.values[positions], self.lengths[chosen], self.keep[positions])

    def kept(self) -> "TokenBatch":
        """Only the scored tokens; every sequence stays, with what it keeps."""
        kept_counts = segment_counts(self.keep, self.offsets).astype(np.int32)
        return TokenBatch(self.values[self.keep], kept_counts, np.ones(int(kept_counts.sum()), dtype=np.bool_))

    @staticmethod
    def concat(batches: Sequence["TokenBatch"]) -> "TokenBatch":
        """All sequences of all batches, in order; at least one batch."""
        return TokenBatch(
            np.concatenate([b.values for b in batches]),
            np.concatenate([b.lengths for b in batches]),
            np.concatenate([b.keep for b in batches]),
        )


def offsets_of(lengths: NDArray[np.integer[Any]] | BoolArray) -> NDArray[np.int64]:
    """`[n + 1]` start positions of runs of the given lengths laid behind each other; the last is their end."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def segment_counts(flags: BoolArray, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[n]` how many flags are set in each run; unlike `np.add.reduceat`, right for empty runs too."""
    running = offsets_of(flags)
    return running[offsets[1:]] - running[offsets[:-1]]


def ragged_positions(starts: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """`[sum(lengths)]` positions of the runs that start at `starts`, run by run."""
    ends = offsets_of(lengths)
    return np.arange(ends[-1], dtype=np.int64) + np.repeat(np.asarray(starts, dtype=np.int64) - ends[:-1], lengths)


def length_groups(lengths: IntArray, max_padded_tokens: int) -> Iterator[NDArray[np.intp]]:
    """Indices of sequences, shortest first, in groups whose padded size stays within `max_padded_tokens`.

    A group holds at least one sequence. It also ends where padding would exceed a quarter of it.
    """
    order = np.argsort(lengths, kind="stable")
    start, tokens = 0, 0
    for end, index in enumerate(order):
        longest = int(lengths[index])
        padded = longest * (end + 1 - start)
        if end > start and (padded > max_padded_tokens or 4 * (padded - tokens - longest) > padded):
            yield order[start:end]
            start, tokens = end, 0
        tokens += longest
    if len(order):
        yield order[start:]


def compact(values: NDArray[Any], what: str) -> NDArray[Any]:
    """`values` as fp16, or as fp32 where fp16 would overflow; the form in which rows are kept and cross processes.

    Raises `NumericalError` naming `what` where there is NaN or infinity.
    """
    if not np.isfinite(values).all():
        raise NumericalError(f"{what}: NaN or infinity among {values.shape} values; the model or its dtype is at fault")
    largest = np.finfo(np.float16).max
    return values.astype(np.float16 if values.size == 0 or np.abs(values).max() <= largest else np.float32)
