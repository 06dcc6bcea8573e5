"""Sequences behind each other instead of padded: every token is worth its work, and attention needs no mask.

Equal lengths stand side by side, so that on a CPU each of them is one attention call over a view of the tokens. On a
GPU one kernel for variable lengths takes all of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tokenalign.devices import to_device
from tokenalign.tokens import IntArray, offsets_of

# What torch.nn.attention.varlen runs on: FlashAttention needs half precision, and compute capability 8.0 (Ampere).
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """How `tokens` rows fall into sequences.

    runs: (sequences, length) of each run of equally long sequences, in the order of the rows
    offsets: `[sequences + 1]` int32 on the rows' device, where each sequence begins; the last is the end
    longest: the longest sequence's tokens
    """

    runs: tuple[tuple[int, int], ...]
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: IntArray, device: torch.device) -> "Packing":
        """The packing of sequences of the given lengths, in this order; few runs where equal lengths are neighbours."""
        starts = np.flatnonzero(np.diff(lengths, prepend=-1))
        counts = np.diff(starts, append=len(lengths))
        runs = tuple((c, n) for c, n in zip(counts.tolist(), lengths[starts].tolist(), strict=True) if n)
        offsets = to_device(offsets_of(lengths).astype(np.int32), device)
        return cls(runs, offsets, int(lengths.max(initial=0)))


def packed_groups(lengths: IntArray, max_tokens: int) -> "list[NDArray[np.intp]]":
    """Indices of sequences, shortest first, in groups of at most `max_tokens` tokens, or of one sequence."""
    order = np.argsort(lengths, kind="stable")
    ends = offsets_of(lengths[order])
    groups = []
    start = 0
    while start < len(order):
        end = max(start + 1, int(np.searchsorted(ends, ends[start] + max_tokens, side="right")) - 1)
        groups.append(order[start:end])
        start = end
    return groups


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Softmax attention of each sequence over itself: `[tokens, heads, d]`.

    query: `[tokens, heads, d]`; key, value: `[tokens, key_heads, d]`, where key_heads divides heads
    scale: of the dot products, 1/sqrt(d) if None
    """
    if _has_flash(query):
        from torch.nn.attention.varlen import varlen_attn

        attended = varlen_attn(
            query,
            key,
            value,
            packing.offsets,
            packing.offsets,
            packing.longest,
            packing.longest,
            scale=scale,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        assert isinstance(attended, Tensor), "no auxiliary output is asked for"  # noqa: S101
        return attended
    if key.shape[1] != query.shape[1]:
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    sizes = [count * length for count, length in packing.runs]
    pieces = []
    for (count, length), *parts in zip(
        packing.runs, *(torch.split(tensor, sizes) for tensor in (query, key, value)), strict=True
    ):
        q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        run = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        pieces.append(run.transpose(1, 2).flatten(0, 1))
    return torch.cat(pieces) if pieces else torch.zeros_like(query)


def _has_flash(query: Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in _FLASH_DTYPES
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )
