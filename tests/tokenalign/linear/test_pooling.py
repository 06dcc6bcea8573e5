"""Vectors of windows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tokenalign.backbone import Backbone
from tokenalign.linear.pooling import natural_pooling, pool
from tokenalign.training.encoder import backbone_reference, load_encoder


def test_the_last_token_or_the_mean_of_all() -> None:
    """Of each sequence by itself, in fp32."""
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.bfloat16)
    lengths = np.array([2, 1], dtype=np.int32)
    assert pool(states, lengths, "last").tolist() == [[3, 4], [5, 6]]
    assert pool(states, lengths, "mean").tolist() == [[2, 3], [5, 6]]
    assert pool(states, lengths, "mean").dtype == torch.float32


@pytest.mark.data
def test_decoders_give_their_last_token(qwen3_backbone: Path, qwen35_backbone: Path, bert_backbone: Path) -> None:
    """A token of Qwen3 or Qwen3.5 sees what stands before it alone; one of BERT sees all."""

    def backbone(folder: Path) -> Backbone:
        reference = backbone_reference(str(folder))
        return load_encoder(reference, name="tiny", label_template="{label}", device="cpu").backbone

    found = [natural_pooling(backbone(folder)) for folder in (qwen3_backbone, qwen35_backbone, bert_backbone)]
    assert found == ["last", "last", "mean"]
