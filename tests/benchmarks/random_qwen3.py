"""A folder with an encoder of Qwen3-1.7B's shape and random weights, and a head for it.

python -m tests.benchmarks.random_qwen3    # asked by the suite in JSON lines, see `children`
"""

import gzip
import shutil
from pathlib import Path

import torch

from tests.benchmarks.children import answer_questions

STD = 0.02


def build(folder: str, tokenizer: str) -> dict[str, str]:
    """Paths of the encoder (3.4 GB, bf16) and of the head, made in `folder` with the tokenizer of another one."""
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3Model

    from tokenalign.config import ModelConfig
    from tokenalign.head import AlignmentHead
    from tokenalign.references import sha256_of
    from tokenalign.weights import save_head

    encoder, head = Path(folder) / "encoder", Path(folder) / "head"
    encoder.mkdir(parents=True)
    shutil.copy(Path(tokenizer) / "tokenizer_config.json", encoder)
    packed = (Path(tokenizer) / "tokenizer.json.gz").read_bytes()
    (encoder / "tokenizer.json").write_bytes(gzip.decompress(packed))
    shape = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2_048,
        intermediate_size=6_144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    shape.architectures = ["Qwen3Model"]
    shape.save_pretrained(encoder)
    with torch.device("meta"):
        names = {name: parameter.shape for name, parameter in Qwen3Model(shape).named_parameters()}
    torch.manual_seed(0)
    weights = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else torch.empty(size, dtype=torch.bfloat16).normal_(0.0, STD)
        for name, size in names.items()
    }
    save_file(weights, encoder / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig.parse(
        {
            "name": "random-qwen3-1.7b",
            "backbone": {"reference": str(encoder), "sha256": sha256_of(encoder / "model.safetensors")},
            "backbone_width": shape.hidden_size,
            "label_template": "The customer's banking issue concerns {label}.",
        }
    )
    save_head(head, config, AlignmentHead(config))
    return {"encoder": str(encoder), "head": str(head)}


if __name__ == "__main__":
    answer_questions({"build": build})
