"""What a student is asked for: the teacher's states between kept layers, and its final ones. No logits, no labels.

A student's layer stands for its own layer of the teacher and those behind it that were left out. So what enters the
student's next layer is compared with what enters the teacher's layer of the same weights (an interface), and what
leaves the model with what leaves the teacher. The cards publish mean losses but no formula; by those, the share of
the interfaces in the total is 0.20 (24 to 8 layers), 0.20 (8 to 6) and 0.14 (6 to 4), so it is 0.2 here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INTERFACE_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Losses:
    """Scalars, 0 where the student gives the teacher's states; interface: mean over interfaces, None without any."""

    total: Tensor
    final: Tensor
    interface: Tensor | None


def relative_error(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Mean over tokens of |student - teacher|² / |teacher|², a scalar; 1 for a student that gives zeros.

    student, teacher: `[B, T, D]`; mask: `[B, T]`, true where there is a token. By token, since a few states of a
    decoder may be hundreds of times larger than the others, and would be all that a plain mean square sees.
    """
    difference = (student.float() - teacher.float()).square().sum(-1)
    size = teacher.float().square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return (difference / size)[mask].mean()


def losses(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    kept: Sequence[int],
    mask: Tensor,
    interface_weight: float = INTERFACE_WEIGHT,
) -> Losses:
    """The losses of one batch.

    student: `[B, T, D]` that enter each of its layers, then the final ones; teacher: likewise; kept: the teacher's
    layer that each of the student's was; mask: `[B, T]`
    """
    final = relative_error(student[-1], teacher[-1], mask)
    # What enters the first layer are embeddings, which the student has from the teacher.
    pairs = [(student[place], teacher[layer]) for place, layer in enumerate(kept) if place]
    if not pairs:
        return Losses(final, final, None)
    interface = torch.stack([relative_error(s, t, mask) for s, t in pairs]).mean()
    return Losses(interface_weight * interface + (1 - interface_weight) * final, final, interface)


def layer_states(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """`[B, T, D]` that enter each layer of a headless model, then those that leave it, after its last norm."""
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    output = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True, **options)
    return (*output.hidden_states[:-1], output.last_hidden_state)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids, mask), both `[B, T]`, of sequences filled up with id 0 on the right."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences], device=device)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]
