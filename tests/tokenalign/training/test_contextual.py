"""Training of the comparison alone, over rows that stay."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenalign.head import AlignmentHead
from tokenalign.training.contextual import ContextualRows
from tokenalign.training.encoder import Encoder
from tokenalign.training.material import Sources, prepare
from tokenalign.training.recipes import Recipe
from tokenalign.training.run import RunOptions, run_training
from tokenalign.training.sampling import epoch_batches
from tokenalign.training.trainer import batch_loss
from tokenalign.weights import load_head


def test_rows_that_stay_give_the_same_loss(
    comparison: Recipe, encoder: Encoder, small_data: Path, small_sources: Sources, feature_dir: Path
) -> None:
    """A batch's loss is that of the whole head without dropout, and so is its gradient."""
    material = prepare(comparison, 42, encoder, data_dir=small_data, feature_dir=feature_dir, sources=small_sources)
    torch.manual_seed(0)
    head = AlignmentHead(encoder.config).eval()
    rows = ContextualRows.of(head, material)
    batch = next(epoch_batches(comparison, material.pools, np.random.default_rng(0)))
    losses = [batch_loss(head, comparison, material, batch, given) for given in (rows, None)]
    assert float(losses[0].detach()) == pytest.approx(float(losses[1].detach()), rel=1e-5)
    gradients = [torch.autograd.grad(loss, [head.query.weight, head.key.weight]) for loss in losses]
    for ours, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-4)


def test_only_the_comparison_learns(comparison: Recipe, run_options: Callable[..., RunOptions]) -> None:
    """Queries and keys pass one matrix, which moves from the identity as the scale does; the blocks add the mean."""
    options = run_options(comparison)
    run_training(options)
    _, head, _ = load_head(options.output)
    assert torch.equal(head.query.weight, head.key.weight)
    assert not torch.equal(head.query.weight, torch.eye(head.width))
    assert float(head.log_scale.detach()) != pytest.approx(math.log(comparison.start_scale), abs=1e-5)
    for block in head.blocks:
        assert not block.get_parameter("ffn_out.weight").any()
    output = head.blocks[0].get_parameter("output.weight")
    assert torch.equal(output, comparison.start_pooled_share * torch.eye(head.width))
