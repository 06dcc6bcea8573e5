"""The rows that leave a head's blocks, computed once for all of training, where the blocks don't learn."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenalign.head import AlignmentHead
from tokenalign.tokens import TokenBatch
from tokenalign.training.features import as_tensor
from tokenalign.training.material import Material

CHUNK_MESSAGES = 1_024


@dataclass(frozen=True, slots=True, eq=False)
class ContextualRows:
    """Rows `[kept tokens, width]` of the texts that are trained on.

    numbers: `[messages]` sorted rows of `Material.messages`, those of the pools; messages: theirs, in that order
    labels: of `Material.label_states`
    """

    numbers: NDArray[np.int64]
    messages: TokenBatch
    labels: TokenBatch

    @classmethod
    @torch.no_grad()
    def of(cls, head: AlignmentHead, material: Material) -> "ContextualRows":
        """What the head makes of the material."""

        def contextual(states: TokenBatch) -> TokenBatch:
            projected = head.project(as_tensor(states, head.device)).cpu().numpy()
            return states.kept().with_values(head.contextualize_ragged(states.with_values(projected)).cpu().numpy())

        numbers = np.unique(np.concatenate([rows for pool in material.pools for rows in pool.messages.values()]))
        chunks = np.split(numbers, range(CHUNK_MESSAGES, len(numbers), CHUNK_MESSAGES))
        messages = TokenBatch.concat([contextual(material.messages.select(chunk)) for chunk in chunks])
        return cls(numbers, messages, contextual(material.label_states))

    def messages_at(self, numbers: NDArray[np.int64]) -> TokenBatch:
        """The rows of those messages, each of a pool."""
        return self.messages.select(np.searchsorted(self.numbers, numbers))
