"""Operations are counted from shapes; checked against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

from tests.benchmarks.flop_counts import EncoderShape, HeadShape, classification_flops
from tokenalign.config import ModelConfig
from tokenalign.head import AlignmentHead
from tokenalign.tokens import TokenBatch

LENGTH = 11


@torch.inference_mode()
def counted_by_torch(model: torch.nn.Module, ids: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        model.eval()(input_ids=ids)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_an_encoders_count_is_torchs(kind: str) -> None:
    """Of one sequence without padding, for both kinds of encoders."""
    model: torch.nn.Module
    if kind == "bert":
        bert = BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
        model, values = BertModel(bert, add_pooling_layer=False), bert.to_dict()
    else:
        qwen = Qwen3Config(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=64,
        )
        model, values = Qwen3Model(qwen), qwen.to_dict()
    model.config._attn_implementation = "eager"
    expected = counted_by_torch(model, torch.randint(0, 50, (1, LENGTH)))
    # Torch counts the outer product that makes the rotary angles as well: half a head's width and a position each.
    assert EncoderShape.of(values).flops(LENGTH) == pytest.approx(expected, rel=0.005)


@torch.inference_mode()
def test_a_classifications_count_is_torchs() -> None:
    """Head and MaxSim, of one document of which some tokens are kept."""
    import numpy as np

    config = ModelConfig.parse(
        {
            "name": "x",
            "backbone": {"reference": "x"},
            "backbone_width": 48,
            "width": 32,
            "ffn_width": 64,
            "blocks": 2,
            "heads": 4,
        }
    )
    head, kept, label_rows = AlignmentHead(config).eval(), 7, 5
    keep = np.arange(LENGTH) < kept
    with FlopCounterMode(display=False) as counter:
        projected = head.project(torch.randn(LENGTH, 48)).numpy()
        batch = TokenBatch(projected, np.array([LENGTH], np.int32), keep)
        keys = head.keys(head.contextualize_ragged(batch))
        torch.randn(label_rows, 32) @ keys.T
    found = classification_flops(
        EncoderShape(0, 48, 0, 0, 0, gated=False), HeadShape(48, 32, 64, 2), [LENGTH], [kept], label_rows
    )
    # The count of attention may miss in torch where a fused kernel is not known to it; all else must agree.
    attention = 2 * 4 * LENGTH * LENGTH * 32
    assert found == pytest.approx(counter.get_total_flops(), abs=attention)
    assert found > 0.8 * counter.get_total_flops()
