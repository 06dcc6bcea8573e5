"""A training run between two epochs, on disk: tensors and facts in one safetensors file that is replaced whole."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenalign.errors import TrainingError

CHECKPOINT_FILE = "checkpoint.safetensors"


def save_checkpoint(folder: Path, run: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the state of the run with fingerprint `run`; an interrupted write leaves the previous one."""
    path = folder / CHECKPOINT_FILE
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    # Copies: tensors that share storage, as the best weights and the current ones may, can't be stored together.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, partial, metadata={"run": run, "facts": json.dumps(dict(facts))})
    partial.replace(path)


def load_checkpoint(folder: Path, run: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """(tensors, facts) as saved, or None where there is no checkpoint.

    Raises `TrainingError` for one of another run, or one that can't be read.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        facts = json.loads(metadata["facts"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"{path} can't be read: {error}; delete the folder and train again") from error
    if metadata.get("run") != run:
        raise TrainingError(
            f"{path} is of another run: recipe, seed, data, backbone or versions differ; give the options of the "
            "interrupted run, or a fresh --output"
        )
    return tensors, facts


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's moments and step counts, named by parameter number."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{key}": value for number, values in state.items() for key, value in values.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; the parameter groups stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, key = name.split(".", 1)
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
