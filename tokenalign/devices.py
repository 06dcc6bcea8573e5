"""What differs between a CPU and an accelerator: how arrays get there, and what happens when its memory is full."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

# How PyTorch's CPU allocator words it, on Linux and elsewhere; it raises a bare RuntimeError.
_CPU_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on `device`; on a CPU it may share its memory.

    Towards a GPU it goes through page-locked memory, so that the host prepares the next pass while this one is copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the error says that a tensor found no room, on an accelerator or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _CPU_ALLOCATOR_WORDS)


def release_memory(device: torch.device) -> None:
    """Gives back what PyTorch keeps of the device's memory for later, so that smaller tensors find room in it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
