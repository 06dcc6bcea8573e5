"""The alignment head: 2.2M parameters between the frozen encoder's token states and the MaxSim score.

Source: the TokenAlign model card, Architecture, steps 3 to 6. All of it computes in fp32.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tokenalign.config import ModelConfig
from tokenalign.maxsim import capped_scale
from tokenalign.packing import Packing, packed_attention, packed_groups
from tokenalign.tokens import TokenBatch, ragged_positions

EPS = 1e-5
DROPOUT = 0.1
INITIAL_SCALE = 10.0
MAX_PADDED_TOKENS = 8_192  # of one padded pass through the blocks in training: bounds memory
MAX_PACKED_TOKENS = 2_048  # of one pass otherwise: what lies between the layers then stays in a CPU's cache

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of query, key and value: [.., length, heads, width / heads]


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
    """A pre-norm bidirectional block: x + Wo·attention(LN(x)), then x + FFN(LN(x)); `[.., length, width]`."""

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

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """x: `[.., length, width]`; `attention` knows which of its tokens see each other."""
        normal = self.attention_norm(x)
        query, key, value = (
            layer(normal).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value)
        )
        x = x + self.dropout(self.output(attention(query, key, value).flatten(-2)))
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

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attended = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=mask[:, None, None, :],
                dropout_p=DROPOUT if self.training else 0.0,
            )
            return attended.transpose(1, 2)

        for block in self.blocks:
            rows = block(rows, attention)
        return rows

    def contextualize_packed(self, rows: Tensor, packing: Packing) -> Tensor:
        """The shared blocks, each sequence by itself, without padding; never in training, whose dropout it leaves out.

        rows: `[tokens, width]`, laid out as `packing` says
        """

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return packed_attention(query, key, value, packing)

        for block in self.blocks:
            rows = block(rows, attention)
        return rows

    def queries(self, rows: Tensor) -> Tensor:
        """Unit rows of the label side: normalize(Wq·x)."""
        return F.normalize(self.query(rows), dim=-1)

    def keys(self, rows: Tensor) -> Tensor:
        """Unit rows of the document side: normalize(Wk·x)."""
        return F.normalize(self.key(rows), dim=-1)

    def contextualize_ragged(self, batch: TokenBatch) -> Tensor:
        """`[kept tokens, width]` contextualised rows of the kept tokens, in order.

        batch: projected rows `[tokens, width]`. Sequences pass through the blocks packed, shortest first.
        """
        # Arrays from another process are read-only, which torch can't share: astype copies.
        values = torch.from_numpy(batch.values.astype(np.float32)).to(self.device)
        offsets = batch.offsets
        out = torch.empty(len(values), self.width, device=self.device)
        for group in packed_groups(batch.lengths, MAX_PACKED_TOKENS):
            lengths = batch.lengths[group]
            positions = torch.from_numpy(ragged_positions(offsets[group], lengths)).to(self.device)
            out[positions] = self.contextualize_packed(values[positions], Packing.of(lengths, self.device))
        return out[torch.from_numpy(np.flatnonzero(batch.keep)).to(self.device)]
