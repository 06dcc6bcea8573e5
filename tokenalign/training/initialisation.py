"""A start that keeps the encoder's geometry: before any training, the head compares tokens as the encoder does."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenalign.head import EPS, AlignmentHead, Block

SAMPLE_TOKENS = 60_000  # enough for a covariance of a few thousand channels


@torch.no_grad()
def start_from_geometry(head: AlignmentHead, states: Tensor, scale: float, pooled_share: float = 0.0) -> None:
    """Set the head's weights so that a token's row is its state along the principal axes, and cosines compare those.

    states: `[tokens, D]` of training messages, at least one. The input bias removes their mean; the projection's rows
    are the axes of largest variance, together scaled to rows of unit variance per channel on average; queries and keys
    are what leaves the blocks. Those add nothing but, in the first, pooled_share · the mean of its text's normalised
    rows: so a similarity is a match of tokens and one of whole texts at once. Axes beyond D are zero. Everything stays
    trainable.
    """
    normal = F.layer_norm(states.double(), states.shape[-1:], eps=EPS)
    mean = normal.mean(dim=0)
    centred = normal - mean
    variances, axes = torch.linalg.eigh(centred.T @ centred / len(centred))
    width = min(head.width, head.backbone_width)
    axes = axes.flip(1)[:, :width]
    # An eigenvector's sign is arbitrary; the largest component is made positive so that machines agree.
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    axes = axes * largest.sign()
    gain = (variances.flip(0)[:width].clamp(min=0).sum() / head.width).rsqrt()
    head.input.weight.fill_(1.0)
    head.input.bias.copy_(-mean)
    head.input.linear.weight.zero_()
    head.input.linear.weight[:width].copy_(axes.T * gain)
    for block in head.blocks:
        _make_identity(block)
    identity = torch.eye(head.width)
    if pooled_share:
        _add_mean(head.blocks[0], pooled_share)
    head.query.weight.copy_(identity)
    head.key.weight.copy_(identity)
    head.log_scale.fill_(math.log(scale))


def _make_identity(block: torch.nn.Module) -> None:
    """What a block adds starts at zero; its inner weights stay random, so that gradients differ by unit."""
    if not isinstance(block, Block):
        raise TypeError(f"a head's block is a Block, not {type(block).__name__}")
    block.output.weight.zero_()
    block.ffn_out.weight.zero_()
    block.ffn_out.bias.zero_()


def _add_mean(block: torch.nn.Module, share: float) -> None:
    """The block's attention becomes a mean over the text: with queries of zero every token weighs the same.

    Keys keep their random weights, so that queries get a gradient.
    """
    if not isinstance(block, Block):
        raise TypeError(f"a head's block is a Block, not {type(block).__name__}")
    identity = torch.eye(len(block.value.weight))
    block.query.weight.zero_()
    block.value.weight.copy_(identity)
    block.output.weight.copy_(share * identity)
