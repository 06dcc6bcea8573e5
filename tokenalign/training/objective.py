"""The loss of one batch: cross-entropy over candidate labels, and what a recipe adds to it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenalign.head import MAX_PADDED_TOKENS, AlignmentHead
from tokenalign.maxsim import maxsim
from tokenalign.tokens import TokenBatch, length_groups, ragged_positions


def scored_rows(head: AlignmentHead, states: Tensor, batch: TokenBatch) -> Tensor:
    """`[kept tokens, width]` contextualised rows of a batch's kept tokens, in order, with gradients.

    states: `[tokens, D]` of the batch's tokens
    """
    rows = head.project(states)
    offsets = batch.offsets
    pieces, places = [], []
    for group in length_groups(batch.lengths, MAX_PADDED_TOKENS):
        lengths = torch.from_numpy(batch.lengths[group]).to(rows.device)
        mask = torch.arange(int(lengths.max()), device=rows.device) < lengths[:, None]
        positions = torch.from_numpy(ragged_positions(offsets[group], batch.lengths[group])).to(rows.device)
        slots = mask.flatten().nonzero().squeeze(1)
        padded = rows.new_zeros(mask.numel(), head.width).index_copy(0, slots, rows[positions])
        out = head.contextualize(padded.view(*mask.shape, head.width), mask)
        pieces.append(out.flatten(0, 1)[slots])
        places.append(positions)
    order = torch.argsort(torch.cat(places))
    kept = torch.from_numpy(batch.keep).to(rows.device)
    return torch.cat(pieces)[order[kept]]


def batch_logits(
    head: AlignmentHead, queries: Tensor, query_lengths: Tensor, keys: Tensor, key_lengths: Tensor
) -> Tensor:
    """`[documents, descriptions]` scale · MaxSim of contextualised rows, before any temperature."""
    return head.scale * maxsim(head.queries(queries), query_lengths, head.keys(keys), key_lengths)


def other_texts_loss(logits: Tensor, positive: Tensor, same: Tensor) -> Tensor:
    """The mean of -log of the probability mass on texts of the right label, over rows and over columns.

    logits, positive, same: `[documents, texts]`; `same` marks a document matched with itself, which counts for neither
    side. Rows and columns without a positive are left out; 0 where none has one.
    """
    lowest = torch.finfo(logits.dtype).min
    open_ = logits.masked_fill(same, lowest)
    right = open_.masked_fill(~positive | same, lowest)
    total = logits.new_zeros(())
    for axis in (1, 0):
        has = (positive & ~same).any(dim=axis)
        if bool(has.any()):
            mass = right.logsumexp(dim=axis)[has] - open_.logsumexp(dim=axis)[has]
            total = total - 0.5 * mass.mean()
    return total


def teacher_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(logits)), the mean over documents; both `[documents, descriptions]`."""
    return F.kl_div(logits.log_softmax(dim=1), teacher.softmax(dim=1), reduction="batchmean")
