"""One vector for each window: the state of its last token, or the mean over all of its tokens."""

import numpy as np
import torch
from torch import Tensor

from tokenalign.backbone import DEFAULT_MAX_BATCH_TOKENS, Backbone
from tokenalign.devices import to_device
from tokenalign.linear.config import Pooling
from tokenalign.tokens import IntArray, TokenBatch, offsets_of

PROBE_TOKENS = 12
# Largest change of an earlier token's state, relative to the largest value, that still is rounding.
ROUNDING = {"float32": 1e-4}
COARSE_ROUNDING = 2e-2


def pooled_states(
    backbone: Backbone, tokens: TokenBatch, pooling: Pooling, *, max_batch_tokens: int = DEFAULT_MAX_BATCH_TOKENS
) -> Tensor:
    """`[sequences, D]` fp32 vectors of the sequences, on the backbone's device."""
    return pool(backbone.encode(tokens, max_batch_tokens=max_batch_tokens), tokens.lengths, pooling)


def pool(states: Tensor, lengths: IntArray, pooling: Pooling) -> Tensor:
    """`[sequences, D]` fp32 of `[tokens, D]` states; every token counts, special ones and punctuation included.

    "last" is what a classification head on a decoder reads (transformers' `...ForSequenceClassification`, and the
    Qwen3.5 cards): only that token has seen the whole window. "mean" is sentence-transformers' Pooling for encoders in
    which every token sees all others.
    """
    if pooling == "last":
        ends = offsets_of(lengths)[1:] - 1
        return states[to_device(ends, states.device)].float()
    counts = to_device(np.asarray(lengths, dtype=np.int64), states.device)
    return torch.segment_reduce(states.float(), "mean", lengths=counts)


def natural_pooling(backbone: Backbone) -> Pooling:
    """ "last" for an encoder whose tokens see only what stands before them, else "mean".

    Found by trying: where the last token of a sequence is another one, do the states before it change?
    """
    ids = np.arange(PROBE_TOKENS, dtype=np.int32) % 2
    other = ids.copy()
    other[-1] = 1 - other[-1]
    length = np.array([PROBE_TOKENS], dtype=np.int32)
    keep = np.ones(PROBE_TOKENS, dtype=np.bool_)
    first, second = (backbone.encode(TokenBatch(values, length, keep)).float()[:-1] for values in (ids, other))
    change = float((first - second).abs().max() / first.abs().max())
    return "last" if change <= ROUNDING.get(backbone.identity.dtype, COARSE_ROUNDING) else "mean"
