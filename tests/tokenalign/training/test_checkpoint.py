"""The state of a run between two epochs."""

from pathlib import Path

import pytest
import torch

from tokenalign.errors import TrainingError
from tokenalign.training.checkpoint import (
    CHECKPOINT_FILE,
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Tensors come back bit for bit, even shared ones, and facts with their exact numbers."""
    tensor = torch.randn(3)
    facts = {"nll": 0.1 + 0.2, "best": [1, None]}
    save_checkpoint(tmp_path, "run", {"a": tensor, "b": tensor[1:], "steps": torch.tensor(7.0)}, facts)
    found = load_checkpoint(tmp_path, "run")
    assert found is not None
    assert torch.equal(found[0]["a"], tensor)
    assert torch.equal(found[0]["b"], tensor[1:])
    assert float(found[0]["steps"]) == 7
    assert found[1] == facts
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_FILE]


def test_no_checkpoint(tmp_path: Path) -> None:
    """A folder without one starts afresh."""
    assert load_checkpoint(tmp_path, "run") is None


def test_another_run_is_refused(tmp_path: Path) -> None:
    """A checkpoint of other options must not be taken up."""
    save_checkpoint(tmp_path, "run", {"a": torch.zeros(1)}, {})
    with pytest.raises(TrainingError, match="is of another run"):
        load_checkpoint(tmp_path, "other")


def test_broken_files_are_named(tmp_path: Path) -> None:
    """A file that is no checkpoint is an error with its path."""
    (tmp_path / CHECKPOINT_FILE).write_bytes(b"no such thing")
    with pytest.raises(TrainingError, match=rf"{CHECKPOINT_FILE} can't be read"):
        load_checkpoint(tmp_path, "run")


def test_optimisers_go_on_where_they_stopped() -> None:
    """A restored optimiser takes the very step that the saved one takes."""

    def step(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradient: float) -> None:
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()

    def fresh() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(torch.ones(2))
        return parameter, torch.optim.AdamW([parameter], lr=0.1)

    parameter, optimizer = fresh()
    step(optimizer, parameter, 1.0)
    copy, resumed = fresh()
    copy.data.copy_(parameter.data)
    restore_optimizer(resumed, {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer).items()})
    step(optimizer, parameter, -2.0)
    step(resumed, copy, -2.0)
    assert torch.equal(copy, parameter)
