"""Arrays on their way to a device, and a device whose memory is full."""

import numpy as np
import pytest
import torch

from tokenalign.devices import is_out_of_memory, release_memory, to_device


def test_arrays_arrive_as_they_are() -> None:
    """Values and dtype stay."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = to_device(array, torch.device("cpu"))
    assert (tensor.dtype, tensor.device.type, tensor.tolist()) == (torch.int32, "cpu", array.tolist())


def test_a_gpu_is_reached_through_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned first, then copied without waiting for it."""
    steps: list[object] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        steps.append("pinned")
        return tensor

    def copy(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        steps.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    to_device(np.zeros(2), torch.device("cuda:1"))
    assert steps == ["pinned", ("cuda:1", True)]


def test_the_cpu_allocators_own_error_is_known() -> None:
    """More than any machine has: the error that this torch raises is taken for what it is; others are not."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(("device", "asked"), [("cuda:0", ["cuda"]), ("mps", ["mps"]), ("cpu", [])])
def test_memory_is_given_back_where_torch_keeps_it(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: list[str]
) -> None:
    """The cache of the device's own allocator is emptied; a CPU has none."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("cuda"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: found.append("mps"))
    release_memory(torch.device(device))
    assert found == asked
