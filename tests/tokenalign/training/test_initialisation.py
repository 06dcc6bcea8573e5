"""The start that keeps the encoder's geometry."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tokenalign.config import ModelConfig
from tokenalign.head import AlignmentHead
from tokenalign.training.initialisation import start_from_geometry


def head_of(backbone_width: int, width: int) -> AlignmentHead:
    """A random head."""
    torch.manual_seed(0)
    config = ModelConfig.parse(
        {"backbone": {"reference": "none"}, "backbone_width": backbone_width, "width": width, "ffn_width": 32}
    )
    return AlignmentHead(config).eval()


@pytest.mark.parametrize(("backbone_width", "width"), [(24, 24), (24, 40)])
def test_all_axes_keep_all_cosines(backbone_width: int, width: int) -> None:
    """With room for every axis, rows compare as the centred, normalised states do, through all blocks."""
    head = head_of(backbone_width, width)
    states = torch.randn(200, backbone_width) * torch.linspace(0.2, 3, backbone_width) + 1
    start_from_geometry(head, states, 20.0)
    rows = head.contextualize(head.project(states)[None], torch.ones(1, 200, dtype=torch.bool))[0].detach()
    normal = F.layer_norm(states, (backbone_width,), eps=1e-5)
    centred = F.normalize(normal - normal.mean(dim=0), dim=-1)
    torch.testing.assert_close(head.queries(rows) @ head.keys(rows).T, centred @ centred.T, atol=1e-4, rtol=0)


def test_fewer_axes_keep_the_largest_variance() -> None:
    """The projection spans the leading principal axes, as numpy's singular vectors have them."""
    head = head_of(24, 8)
    states = torch.randn(500, 24) * torch.linspace(0.2, 3, 24)
    start_from_geometry(head, states, 20.0)
    normal = F.layer_norm(states.double(), (24,), eps=1e-5).numpy()
    _, _, axes = np.linalg.svd(normal - normal.mean(axis=0), full_matrices=False)
    weight = head.input.linear.weight.detach().double().numpy()
    overlap = np.abs(axes[:8] @ (weight / np.linalg.norm(weight, axis=1, keepdims=True)).T)
    np.testing.assert_allclose(overlap, np.eye(8), atol=1e-3)


def test_rows_have_unit_scale_and_no_mean() -> None:
    """Projected rows have variance one per channel on average, mean zero, and the scale asked for."""
    head = head_of(24, 8)
    states = torch.randn(500, 24) * 7 + 3
    start_from_geometry(head, states, 20.0)
    rows = head.project(states).detach()
    assert float(rows.var(dim=0, correction=0).mean()) == pytest.approx(1.0, rel=1e-4)
    assert float(rows.mean(dim=0).abs().max()) < 1e-4
    assert float(head.scale.detach()) == pytest.approx(20.0)


def test_every_weight_can_still_learn() -> None:
    """A zero output must not stop its own gradient: every block's outputs get one from the first step on."""
    head = head_of(24, 8)
    start_from_geometry(head, torch.randn(100, 24), 20.0)
    rows = head.contextualize(head.project(torch.randn(1, 5, 24)), torch.ones(1, 5, dtype=torch.bool))
    loss = head.queries(rows).pow(3).sum()
    names = ["input.weight", "input.bias", "input.linear.weight", "query.weight"]
    names += [f"blocks.{block}.{layer}" for block in range(2) for layer in ("output.weight", "ffn_out.weight")]
    gradients = torch.autograd.grad(loss, [head.get_parameter(name) for name in names])
    for name, gradient in zip(names, gradients, strict=True):
        assert float(gradient.abs().sum()) > 0, name
