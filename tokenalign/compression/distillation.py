"""Distillation: a student that starts from kept layers learns its teacher's states on unlabelled text.

On one device in float32. Dropout is off in both models, and batches follow from the seed, so that a run on a CPU gives
the same weights again, also when it was interrupted and resumed.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from tokenalign.compression.objective import INTERFACE_WEIGHT, Losses, layer_states, losses, padded
from tokenalign.compression.recurrent import is_recurrent_scalar
from tokenalign.compression.texts import MAX_LENGTH
from tokenalign.errors import CompressionError
from tokenalign.training.checkpoint import load_checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint

WARM_UP_SHARE = 0.1
MAX_GRADIENT_NORM = 1.0

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How to distil; interface_weight: share of the interfaces in the loss; freeze_embedding: if the table stays."""

    epochs: int = 1
    batch_size: int = 8
    learning_rate: float = 1e-4
    max_length: int = MAX_LENGTH
    held_out_share: float = 0.05
    interface_weight: float = INTERFACE_WEIGHT
    freeze_embedding: bool = False
    seed: int = 0
    checkpoint_steps: int = 100

    def __post_init__(self) -> None:
        """Raise `CompressionError` for a value out of its bounds."""
        for name in ("epochs", "batch_size", "max_length", "checkpoint_steps"):
            if getattr(self, name) < 1:
                raise CompressionError(f"{name} must be at least 1; it is {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise CompressionError(f"learning_rate must be above 0; it is {self.learning_rate}")
        if not 0 <= self.interface_weight <= 1:
            raise CompressionError(f"interface_weight must be from 0 to 1; it is {self.interface_weight}")
        if not 0 < self.held_out_share < 1:
            raise CompressionError(f"held_out_share must be between 0 and 1; it is {self.held_out_share}")


@dataclass(slots=True)
class Run:
    """A teacher, its student, and where they are. history: losses of every step, and of the held-out texts by epoch."""

    teacher: Any
    student: Any
    kept: tuple[int, ...]
    options: Options
    train: list[list[int]]
    held_out: list[list[int]]
    fingerprint: str
    history: list[Record] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Of both models."""
        device: torch.device = self.student.device
        return device

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return math.ceil(len(self.train) / self.options.batch_size)

    @property
    def steps(self) -> int:
        """Batches of the whole run."""
        return self.options.epochs * self.steps_per_epoch


def run_fingerprint(options: Options, inputs: dict[str, Any]) -> str:
    """Hex digest of what a run depends on; a checkpoint of another one is not gone on with."""
    return sha256(json.dumps([asdict(options), inputs], sort_keys=True).encode()).hexdigest()


def distil(run: Run, folder: Path, *, on_step: Callable[[int, Record], None] = lambda step, record: None) -> None:
    """Train the student in place; `run.history` is complete afterwards.

    It goes on behind the checkpoint in `folder` where there is one, and writes one every `checkpoint_steps` steps.
    Raises `TrainingError` for a checkpoint of another run, `CompressionError` where the loss is no number.
    """
    parameters = trained_parameters(run.student, freeze_embedding=run.options.freeze_embedding)
    optimizer = torch.optim.AdamW(parameters, lr=run.options.learning_rate, weight_decay=0.0)
    done = _restore(run, optimizer, folder)
    if not done:
        run.history.append({"step": 0, "held_out": held_out_losses(run)})
        on_step(0, run.history[-1])
    for step, batch in enumerate(_batches(run), 1):
        if step <= done:
            continue
        found = _losses(run, batch)
        if not torch.isfinite(found.total):
            raise CompressionError(f"step {step}: the loss is {found.total.item()}; lower the learning rate")
        optimizer.zero_grad()
        found.total.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        learning_rate = run.options.learning_rate * rate(step, run.steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        record: Record = {"step": step, "learning_rate": learning_rate, **as_numbers(found)}
        if step % run.steps_per_epoch == 0:
            record["held_out"] = held_out_losses(run)
        run.history.append(record)
        on_step(step, record)
        if step % run.options.checkpoint_steps == 0 and step < run.steps:
            _save(run, optimizer, step, folder)


def trained_parameters(student: Any, *, freeze_embedding: bool) -> list[torch.nn.Parameter]:
    """The parameters that training changes; the others no longer ask for gradients."""
    embedding = {id(parameter) for parameter in student.get_input_embeddings().parameters()}
    for name, parameter in student.named_parameters():
        frozen = is_recurrent_scalar(name) or (freeze_embedding and id(parameter) in embedding)
        parameter.requires_grad_(not frozen)
    return [parameter for parameter in student.parameters() if parameter.requires_grad]


def rate(step: int, steps: int) -> float:
    """The share of the learning rate at a step from 1 on: a linear rise to 1, then half a cosine to just above 0."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step <= warm_up:
        return step / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up + 1)))


@torch.inference_mode()
def held_out_losses(run: Run) -> dict[str, float]:
    """The losses on the texts that are not trained on, mean over their batches, each weighed by its tokens."""
    size = run.options.batch_size
    sums: dict[str, float] = {}
    tokens = sum(map(len, run.held_out))
    for start in range(0, len(run.held_out), size):
        batch = run.held_out[start : start + size]
        share = sum(map(len, batch)) / tokens
        for name, value in as_numbers(_losses(run, batch)).items():
            sums[name] = sums.get(name, 0.0) + share * value
    return sums


def as_numbers(found: Losses) -> dict[str, float]:
    """Losses as a history holds them."""
    numbers = {"total": found.total.item(), "final": found.final.item()}
    return numbers if found.interface is None else numbers | {"interface": found.interface.item()}


def epoch_means(run: Run) -> list[Record]:
    """For each epoch the mean training losses over its steps, and the losses on the held-out texts at its end."""
    steps = [record for record in run.history if record["step"]]
    means = []
    for start in range(0, len(steps), run.steps_per_epoch):
        records = steps[start : start + run.steps_per_epoch]
        names = [name for name in ("total", "final", "interface") if name in records[0]]
        mean = {name: sum(record[name] for record in records) / len(records) for name in names}
        means.append({"train": mean, "held_out": records[-1]["held_out"]})
    return means


def _losses(run: Run, batch: Sequence[Sequence[int]]) -> Losses:
    ids, mask = padded(batch, run.device)
    with torch.no_grad():
        teacher = layer_states(run.teacher, ids, mask)
    return losses(layer_states(run.student, ids, mask), teacher, run.kept, mask, run.options.interface_weight)


def _batches(run: Run) -> Iterator[list[list[int]]]:
    generator = torch.Generator().manual_seed(run.options.seed)
    for _ in range(run.options.epochs):
        order = torch.randperm(len(run.train), generator=generator).tolist()
        for start in range(0, len(order), run.options.batch_size):
            yield [run.train[i] for i in order[start : start + run.options.batch_size]]


def _save(run: Run, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    tensors = {f"student.{name}": tensor for name, tensor in run.student.state_dict().items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(optimizer).items()}
    save_checkpoint(folder, run.fingerprint, tensors, {"step": step, "history": run.history})


def _restore(run: Run, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """The steps that a checkpoint has behind it; 0 without one."""
    saved = load_checkpoint(folder, run.fingerprint)
    if saved is None:
        return 0
    tensors, facts = saved
    parts: dict[str, dict[str, torch.Tensor]] = {"student": {}, "optimizer": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    run.student.load_state_dict(parts["student"])
    restore_optimizer(optimizer, parts["optimizer"])
    run.history[:] = facts["history"]
    return int(facts["step"])
