"""Floating-point operations of a classification, counted from shapes: what is needed, padding left out.

A product of [m, k] and [k, n] counts as 2·m·k·n. Norms, softmax and activations are left out: they are under a percent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Widths of a transformer encoder; `gated` is a feed-forward part of three matrices instead of two."""

    layers: int
    width: int
    ffn_width: int
    query_width: int
    key_width: int
    gated: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "EncoderShape":
        """From a Hugging Face configuration of the BERT or the Qwen3 kind."""
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_width = int(config.get("head_dim") or width // heads)
        key_heads = int(config.get("num_key_value_heads") or heads)
        return cls(
            layers=int(config["num_hidden_layers"]),
            width=width,
            ffn_width=int(config["intermediate_size"]),
            query_width=heads * head_width,
            key_width=key_heads * head_width,
            gated="num_key_value_heads" in config,
        )

    def flops(self, length: int) -> float:
        """Of one sequence of `length` tokens."""
        attention_weights = self.width * (2 * self.query_width + 2 * self.key_width)
        ffn_weights = (3 if self.gated else 2) * self.width * self.ffn_width
        per_token = 2 * (attention_weights + ffn_weights) + 4 * length * self.query_width
        return float(self.layers * length * per_token)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Widths of the head: a projection from the encoder's width, and blocks of attention and feed-forward."""

    encoder_width: int
    width: int
    ffn_width: int
    blocks: int

    def flops(self, length: int, kept: int) -> float:
        """Of one document of `length` tokens of which `kept` get a key."""
        projection = 2 * length * self.encoder_width * self.width
        per_token = 2 * (4 * self.width**2 + 2 * self.width * self.ffn_width) + 4 * length * self.width
        return float(projection + self.blocks * length * per_token + 2 * kept * self.width**2)


def classification_flops(
    encoder: EncoderShape, head: HeadShape, lengths: Sequence[int], kept: Sequence[int], label_rows: int
) -> float:
    """Of documents of these lengths and kept tokens, scored against `label_rows` known rows."""
    return sum(
        encoder.flops(length) + head.flops(length, keys) + 2 * keys * label_rows * head.width
        for length, keys in zip(lengths, kept, strict=True)
    )
