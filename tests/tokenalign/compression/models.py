"""Configurations of Qwen3.5 in full and in small, and random models of them on disk."""

from pathlib import Path
from typing import Any

FULL = {
    "hidden_size": 1_024,
    "intermediate_size": 3_584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
THIN = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # so that layers change what passes through them
}


def qwen35_config(layers: int, rows: int, **sizes: Any) -> Any:
    """A Qwen3.5 configuration: every fourth layer attends to all, as the released ones have it."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(vocab_size=rows, num_hidden_layers=layers, **sizes)


def save_random(config: Any, folder: Path, *, seed: int = 7) -> Path:
    """The folder with a random model of a configuration, in bfloat16."""
    import torch
    from transformers import AutoModel

    torch.manual_seed(seed)
    AutoModel.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
