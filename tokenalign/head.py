"""The alignment head: 2.2M parameters between the frozen encoder's token states and the MaxSim score.

Source: the TokenAlign model card, Architecture, steps 3 to 6. All of it computes in fp32.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenalign.config import ModelConfig
from tokenalign.maxsim import capped_scale
from tokenalign.tokens import TokenBatch, length_groups, ragged_positions

EPS = 1e-5
DROPOUT = 0.1
INITIAL_SCALE = 10.0
MAX_PADDED_TOKENS = 8_192  # of one forward pass through the blocks: bounds memory, and short texts wait for no long one


class InputProjection(nn.Module):
    """LayerNorm without affine, a learned weight and bias per channel, Linear without bias: `[.., D] -> [.., width]`.

    The affine is kept apart from the normalisation on purpose: the card reports wrong affine gradients of the native
    LayerNorm on frozen inputs under PyTorch 2.6 on Metal.
    """

    def __init__(self, backbone_width: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(backbone_width))
        self.bias = nn.Parameter(torch.zeros(backbone_width))
        self.linear = nn.Linear(backbone_width, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        normal = F.layer_norm(states.float(), states.shape[-1:], eps=EPS)
        projected: Tensor = self.linear(normal * self.weight + self.bias)
        return projected


class Block(nn.Module):
    """A pre-norm bidirectional block: x + Wo·attention(LN(x)), then x + FFN(LN(x)); `[batch, length, width]`."""

    def __init__(self, width: int, heads: int, ffn_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, eps=EPS)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.LayerNorm(width, eps=EPS)
        self.ffn_in = nn.Linear(width, ffn_width)
        self.ffn_out = nn.Linear(ffn_width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: `[batch, length, width]`; mask: `[batch, 1, 1, length]` bool, true where there is a token."""
        normal = self.attention_norm(x)
        query, key, value = (
            layer(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=DROPOUT if self.training else 0.0
        )
        x = x + self.dropout(self.output(attended.transpose(1, 2).flatten(-2)))
        hidden = self.dropout(F.gelu(self.ffn_in(self.ffn_norm(x))))
        out: Tensor = x + self.dropout(self.ffn_out(hidden))
        return out


class AlignmentHead(nn.Module):
    """Projects, contextualises and compares; at D = 2,048 exactly 2,236,929 parameters.

    The stages are separate methods, since they run in different processes when served.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.width
        self.backbone_width = config.backbone_width
        self.input = InputProjection(config.backbone_width, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, config.ffn_width) for _ in range(config.blocks))
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(INITIAL_SCALE).log())

    @property
    def device(self) -> torch.device:
        return self.log_scale.device

    @property
    def scale(self) -> Tensor:
        """The learned scale of the logits, at most 100."""
        return capped_scale(self.log_scale)

    def project(self, states: Tensor) -> Tensor:
        """The token-wise first stage: `[tokens, D]` states of any float dtype -> `[tokens, width]` fp32."""
        projected: Tensor = self.input(states)
        return projected

    def contextualize(self, rows: Tensor, mask: Tensor) -> Tensor:
        """The shared blocks, each sequence by itself.

        rows: `[batch, length, width]`, mask: `[batch, length]` bool, true where there is a token
        """
        attention_mask = mask[:, None, None, :]
        for block in self.blocks:
            rows = block(rows, attention_mask)
        return rows

    def queries(self, rows: Tensor) -> Tensor:
        """Unit rows of the label side: normalize(Wq·x)."""
        return F.normalize(self.query(rows), dim=-1)

    def keys(self, rows: Tensor) -> Tensor:
        """Unit rows of the document side: normalize(Wk·x)."""
        return F.normalize(self.key(rows), dim=-1)

    def contextualize_ragged(self, batch: TokenBatch) -> Tensor:
        """`[kept tokens, width]` contextualised rows of the kept tokens, in order.

        batch: projected rows `[tokens, width]`. Sequences pass through the blocks in groups of similar length, so
        little of the work is padding.
        """
        # Arrays from another process are read-only, which torch can't share: astype copies.
        values = torch.from_numpy(batch.values.astype(np.float32)).to(self.device)
        offsets = batch.offsets
        out = torch.empty(len(values), self.width, device=self.device)
        for group in length_groups(batch.lengths, MAX_PADDED_TOKENS):
            lengths = torch.from_numpy(batch.lengths[group]).to(self.device)
            mask = torch.arange(int(lengths.max()), device=self.device) < lengths[:, None]
            positions = torch.from_numpy(ragged_positions(offsets[group], batch.lengths[group])).to(self.device)
            padded = values.new_zeros(*mask.shape, self.width)
            padded[mask] = values[positions]
            out[positions] = self.contextualize(padded, mask)[mask]
        return out[torch.from_numpy(np.flatnonzero(batch.keep)).to(self.device)]
