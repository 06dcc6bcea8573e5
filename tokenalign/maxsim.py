"""The scoring maths as free functions: MaxSim between label tokens and document tokens, and the softmax over labels.

Source: the TokenAlign model card, Architecture, steps 5 and 6; MaxSim is Khattab and Zaharia, 2020 (ColBERT), eq. 3,
as a mean over the query side instead of a sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SCALE = 100.0


def similarities(queries: Tensor, keys: Tensor) -> Tensor:
    """All dot products, `einsum("qd,kd->kq")`, in one matrix product.

    queries: `[label_tokens, d]`, keys: `[document_tokens, d]`, both of unit rows
    returns: `[document_tokens, label_tokens]`, cosines
    """
    return keys @ queries.T


def best_per_document(sims: Tensor, key_lengths: Tensor) -> Tensor:
    """The best similarity of each label token within each document.

    sims: `[document_tokens, label_tokens]`, key_lengths: `[documents]` int64, each at least 1
    returns: `[documents, label_tokens]`
    Padding never enters: only kept tokens are given, and the maximum starts from the dtype's minimum, so that negative
    similarities win over it. Raises ValueError for a document without tokens, for which no maximum exists.
    """
    _require_tokens(key_lengths, "document")
    start = sims.new_full((len(key_lengths), sims.shape[1]), torch.finfo(sims.dtype).min)
    return start.scatter_reduce(0, _owners(key_lengths)[:, None].expand_as(sims), sims, "amax")


def mean_per_label(best: Tensor, query_lengths: Tensor) -> Tensor:
    """The mean over each description's tokens.

    best: `[documents, label_tokens]`, query_lengths: `[descriptions]` int64, each at least 1
    returns: `[documents, descriptions]`
    """
    _require_tokens(query_lengths, "label")
    sums = best.new_zeros(len(query_lengths), best.shape[0]).index_add(0, _owners(query_lengths), best.T)
    return (sums / query_lengths[:, None]).T


def best_description(logits: Tensor, owners: Tensor, labels: int) -> Tensor:
    """The largest logit among each label's descriptions.

    logits: `[documents, descriptions]`, owners: `[descriptions]` int64, the label that each description belongs to
    returns: `[documents, labels]`
    """
    if labels == logits.shape[1]:
        return logits
    start = logits.new_full((logits.shape[0], labels), torch.finfo(logits.dtype).min)
    return start.scatter_reduce(1, owners.expand_as(logits), logits, "amax")


def maxsim(queries: Tensor, query_lengths: Tensor, keys: Tensor, key_lengths: Tensor) -> Tensor:
    """mean_i max_j q[c,i]·k[b,j] of every document b with every description c: `[documents, descriptions]`.

    queries: `[label_tokens, d]` laid behind each other by query_lengths `[descriptions]`; keys and key_lengths likewise
    """
    return mean_per_label(best_per_document(similarities(queries, keys), key_lengths), query_lengths)


def capped_scale(log_scale: Tensor) -> Tensor:
    """exp(log_scale), at most 100."""
    return log_scale.exp().clamp(max=MAX_SCALE)


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Where each token of one description found its best match in one document.

    key_index: `[label_tokens]` int64, position among the document's kept tokens
    similarity: `[label_tokens]`, the cosine there
    median: `[label_tokens]`, the median cosine over the document's kept tokens
    """

    key_index: Tensor
    similarity: Tensor
    median: Tensor


def matches(queries: Tensor, keys: Tensor) -> Matches:
    """The best match of each label token; queries: `[label_tokens, d]`, keys: `[document_tokens, d]`."""
    sims = similarities(queries, keys)
    best = sims.max(dim=0)
    return Matches(best.indices, best.values, sims.median(dim=0).values)


def _owners(lengths: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def _require_tokens(lengths: Tensor, what: str) -> None:
    if bool((lengths < 1).any()):
        raise ValueError(f"{what} {int((lengths < 1).nonzero()[0])} has no token to score")
