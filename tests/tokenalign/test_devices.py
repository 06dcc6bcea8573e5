"""Arrays on their way to a device and back, and a device whose memory is full."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tokenalign.devices import is_out_of_memory, release_memory, to_device, to_host


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


def test_tensors_come_back_as_they_are() -> None:
    """Values, shape and dtype stay, also of a tensor that is no run of memory; the array is no copy on a CPU."""
    tensor = torch.arange(6, dtype=torch.int32).reshape(2, 3).T
    array = to_host(tensor)
    assert (array.dtype.name, array.tolist()) == ("int32", tensor.tolist())
    tensor[0, 0] = 9
    assert array[0, 0] == 9


class Gpu:
    """Stands for PyTorch's interface to a GPU, and writes down what it is asked, in order.

    Streams have names: "compute" is where the calling thread computes, and each that is made gets a number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, ...]] = []
        self.entered = "compute"
        self.made: list[FakeStream] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(self, "compute"))
        monkeypatch.setattr(torch.cuda, "Stream", self._make)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self._allocate)

    def _make(self, device: torch.device) -> "FakeStream":
        self.made.append(FakeStream(self, f"copies {len(self.made)} of {device}"))
        return self.made[-1]

    def _enter(self, stream: "FakeStream") -> AbstractContextManager[None]:
        self.entered = stream.name
        return nullcontext()

    def _allocate(self, shape: Any, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        self.steps.append(("allocate", "locked" if pin_memory else "pageable"))
        return HostMemory(self._empty(shape, dtype=dtype), self)  # type: ignore[return-value]


class FakeStream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def record_event(self) -> "FakeEvent":
        self.gpu.steps.append(("record", self.name))
        return FakeEvent(self.gpu, self.name)

    def wait_event(self, event: "FakeEvent") -> None:
        self.gpu.steps.append(("wait", self.name, event.name))


class FakeEvent:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def synchronize(self) -> None:
        self.gpu.steps.append(("synchronise", self.name))


class HostMemory:
    """Memory of the host."""

    def __init__(self, tensor: torch.Tensor, gpu: Gpu) -> None:
        self._tensor, self._gpu = tensor, gpu

    def copy_(self, source: "OnGpu", *, non_blocking: bool) -> None:
        self._gpu.steps.append(("copy", self._gpu.entered, "without waiting" if non_blocking else "waiting"))
        self._tensor.copy_(source.values)

    def numpy(self) -> Any:
        self._gpu.steps.append(("read",))
        return self._tensor.numpy()


class OnGpu:
    """A tensor that says it is on a GPU."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.device, self.shape, self.dtype = torch.device("cuda:1"), values.shape, values.dtype


def test_a_gpus_rows_are_copied_beside_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy follows what was computed, on another stream, into locked memory, and is read once it is complete."""
    gpu = Gpu(monkeypatch)
    array = to_host(OnGpu(torch.tensor([[1.5, 2.5]])))  # type: ignore[arg-type]
    assert array.tolist() == [[1.5, 2.5]]
    copies = "copies 0 of cuda:1"
    assert gpu.steps == [
        ("record", "compute"),
        ("wait", copies, "compute"),
        ("allocate", "locked"),
        ("copy", copies, "without waiting"),
        ("record", copies),
        ("synchronise", copies),
        ("read",),
    ]


def test_each_thread_has_a_stream_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread makes one and keeps it; it isn't another thread's, whose copies would hold up its own."""
    gpu = Gpu(monkeypatch)
    tensor: Any = OnGpu(torch.zeros(2))
    for _ in range(2):
        with ThreadPoolExecutor(1) as thread:
            list(thread.map(to_host, [tensor, tensor]))
    assert len(gpu.made) == 2
    assert [step[1] for step in gpu.steps if step[0] == "copy"] == [
        stream.name for stream in gpu.made for _ in range(2)
    ]


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
