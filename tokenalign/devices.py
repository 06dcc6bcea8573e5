"""What differs between a CPU and an accelerator: how arrays get there and back, and what its full memory means."""

import threading
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

# How PyTorch's CPU allocator words it, on Linux and elsewhere; it raises a bare RuntimeError.
_CPU_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory")


class _CopyStreams(threading.local):
    """The calling thread's streams for copies to the host, by device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self._streams[device]


_copy_streams = _CopyStreams()


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on `device`; on a CPU it may share its memory.

    Towards a GPU it goes through page-locked memory, so that the host prepares the next pass while this one is copied.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array, copied once it is computed; on a CPU the array shares its memory.

    From a GPU it goes into page-locked memory on a stream of this thread's own: only this thread waits, and only for
    what it had computed, while the kernels that others asked for meanwhile run beside the copy. The array holds the
    locked memory as long as it lives, so what is kept should be a copy of it.
    """
    if tensor.device.type != "cuda":
        array: NDArray[Any] = tensor.cpu().numpy()
        return array
    stream = _copy_streams.of(tensor.device)
    stream.wait_event(torch.cuda.current_stream(tensor.device).record_event())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(tensor, non_blocking=True)
        copied = stream.record_event()
    copied.synchronize()  # before the caller may drop the tensor: the allocator knows nothing of the second stream
    return host.numpy()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the error says that a tensor found no room, on an accelerator or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _CPU_ALLOCATOR_WORDS)


def release_memory(device: torch.device) -> None:
    """Gives back what PyTorch keeps of the device's memory for later, so that smaller tensors find room in it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
