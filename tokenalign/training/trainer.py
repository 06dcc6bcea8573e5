"""The training loop: epochs over prepared material, the best one kept by validation NLL, resumable after each.

Every epoch seeds its own generators from (seed, epoch), so a run that was killed and resumed takes the same steps as
one that was not, and ends with the same bits on the same machine with as many threads.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenalign.config import ModelConfig
from tokenalign.errors import TrainingError
from tokenalign.evaluation import accuracy, negative_log_likelihood, softmax_at
from tokenalign.head import AlignmentHead
from tokenalign.results import FloatArray
from tokenalign.scoring import Aligner
from tokenalign.tokens import TokenBatch
from tokenalign.training.checkpoint import load_checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint
from tokenalign.training.contextual import ContextualRows
from tokenalign.training.features import as_tensor
from tokenalign.training.initialisation import SAMPLE_TOKENS, start_from_geometry
from tokenalign.training.material import Material, Validation
from tokenalign.training.objective import batch_logits, other_texts_loss, scored_rows, teacher_loss
from tokenalign.training.recipes import Recipe
from tokenalign.training.sampling import Batch, epoch_batches, epoch_length

WARM_UP_SHARE = 0.1
FINAL_RATE_SHARE = 0.05
CHUNK_DOCUMENTS = 1_024
APART = -1e4  # a logit so low that its softmax is 0, and still finite in products with 0


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What an epoch gave; epoch 0 is the start, before any step. `loss` is the mean over its batches."""

    epoch: int
    loss: float | None
    validation_nll: float
    validation_accuracy: float
    scale: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands within an epoch: batches done of all, the loss of the last one, and the best NLL so far."""

    epoch: int
    batch: int
    batches: int
    loss: float
    best_nll: float


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The head of the best epoch, and the report of every epoch."""

    head: AlignmentHead
    best_epoch: int
    history: tuple[EpochReport, ...]


OnProgress = Callable[[Progress], None]
OnEpoch = Callable[[EpochReport], None]


def train_head(
    recipe: Recipe,
    seed: int,
    config: ModelConfig,
    material: Material,
    *,
    device: torch.device,
    folder: Path,
    run: str,
    on_progress: OnProgress | None = None,
    on_epoch: OnEpoch | None = None,
) -> Trained:
    """The trained head, from the checkpoint of run `run` in `folder` where there is one, which each epoch replaces.

    Raises `TrainingError` when the loss is no number any more, or the checkpoint is of another run.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        state = _State.start(recipe, seed, config, material, device)
        if (saved := load_checkpoint(folder, run)) is not None:
            state.restore(*saved)
        while not state.finished():
            state.run_epoch(on_progress)
            save_checkpoint(folder, run, state.tensors(), state.facts())
            if on_epoch is not None:
                on_epoch(state.history[-1])
    return state.result()


def validation_logits(
    head: AlignmentHead, material: Material, documents: TokenBatch, temperature: float = 1.0
) -> FloatArray:
    """`[documents, validation labels]` logits, computed as a classifier does; the head itself stays as it is."""
    aligner = Aligner(copy.deepcopy(head), temperature)

    def project(states: TokenBatch, what: str) -> TokenBatch:
        return states.with_values(aligner.project(as_tensor(states, head.device), what))

    queries = aligner.label_queries(project(material.validation_label_states, "labels"))
    rows = []
    for start in range(0, len(documents), CHUNK_DOCUMENTS):
        chunk = documents.select(np.arange(start, min(start + CHUNK_DOCUMENTS, len(documents))))
        keys = aligner.document_keys(project(chunk, "texts"))
        rows.append(aligner.logits(material.validation_labels, queries, keys))
    logits: FloatArray = np.concatenate(rows)
    return logits


def learning_rate_at(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of step `step`, counted from 1."""
    if recipe.schedule == "constant":
        return recipe.learning_rate
    total = recipe.max_epochs * steps_per_epoch
    warm_up = max(1, round(WARM_UP_SHARE * total))
    if step <= warm_up:
        return recipe.learning_rate * step / warm_up
    progress = (step - warm_up) / max(1, total - warm_up)
    falling = 0.5 * (1 + math.cos(math.pi * progress))
    return recipe.learning_rate * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * falling)


@dataclass(slots=True, eq=False)
class _State:
    """A run between two epochs."""

    recipe: Recipe
    seed: int
    material: Material
    head: AlignmentHead
    average: AlignmentHead
    best: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    history: list[EpochReport]
    rows: ContextualRows | None

    @classmethod
    def start(
        cls, recipe: Recipe, seed: int, config: ModelConfig, material: Material, device: torch.device
    ) -> "_State":
        torch.manual_seed(_epoch_seed(seed, 0))
        head = AlignmentHead(config)
        if recipe.start == "geometry":
            start_from_geometry(head, _sample_states(material, seed), recipe.start_scale, recipe.start_pooled_share)
        else:
            with torch.no_grad():
                head.log_scale.fill_(math.log(recipe.start_scale))
        head.to(device)
        rows = None
        if recipe.trained == "comparison":
            rows = ContextualRows.of(head, material)
            head.requires_grad_(False)
            head.key.weight = head.query.weight
            for parameter in (head.query.weight, head.log_scale):
                parameter.requires_grad_()
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        state = cls(recipe, seed, material, head, copy.deepcopy(head), {}, optimizer, [], rows)
        state.validate(None)
        return state

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return len(self.history) - 1

    @property
    def best_epoch(self) -> int:
        """The epoch to keep: of the lowest validation NLL, the first of equals, or the last; 0 is the start itself."""
        if self.recipe.keep == "last":
            return self.epoch
        return int(np.argmin([report.validation_nll for report in self.history]))

    @property
    def improved_epoch(self) -> int:
        """The last epoch whose validation NLL fell by enough to count, which patience is counted from."""
        if self.recipe.keep == "last":
            return self.epoch
        last = 0
        for epoch, report in enumerate(self.history):
            if report.validation_nll < self.history[last].validation_nll - self.recipe.min_improvement:
                last = epoch
        return last

    def finished(self) -> bool:
        return self.epoch >= self.recipe.max_epochs or self.epoch - self.improved_epoch >= self.recipe.patience

    def run_epoch(self, on_progress: OnProgress | None) -> None:
        epoch = self.epoch + 1
        rng = np.random.default_rng([self.seed, epoch])
        torch.manual_seed(_epoch_seed(self.seed, epoch))
        steps = epoch_length(self.recipe, self.material.pools)
        best_nll = self.history[self.best_epoch].validation_nll
        losses = []
        self.head.train()
        for number, batch in enumerate(epoch_batches(self.recipe, self.material.pools, rng), start=1):
            losses.append(self.step(batch, (epoch - 1) * steps + number, steps))
            if on_progress is not None:
                on_progress(Progress(epoch, number, steps, losses[-1], best_nll))
        self.validate(float(np.mean(losses)))

    def step(self, batch: Batch, number: int, steps_per_epoch: int) -> float:
        """Take optimiser step `number` and give its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.recipe, number, steps_per_epoch)
        loss = batch_loss(self.head, self.recipe, self.material, batch, self.rows)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss of step {number} is {value}; lower the learning rate of recipe {self.recipe.name!r} "
                f"({self.recipe.learning_rate:g})"
            )
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        self.update_average(number)
        return value

    @torch.no_grad()
    def update_average(self, number: int) -> None:
        # At first the average follows quickly, or it would remember the start for hundreds of steps.
        decay = min(self.recipe.average_decay, number / (number + 10))
        for average, current in zip(self.average.parameters(), self.head.parameters(), strict=True):
            average.lerp_(current, 1 - decay)

    def validate(self, loss: float | None) -> None:
        """Add the report of the epoch that ended, and keep its weights where they are the best so far."""
        validation = self.material.select
        nll, share = validation_figures(self.average, self.material, validation)
        self.history.append(EpochReport(self.epoch + 1, loss, nll, share, float(self.average.scale.detach())))
        if self.best_epoch == self.epoch:
            self.best = {name: tensor.detach().clone() for name, tensor in self.average.state_dict().items()}

    def tensors(self) -> dict[str, Tensor]:
        parts = {
            "head": self.head.state_dict(),
            "average": self.average.state_dict(),
            "best": self.best,
            "optimizer": optimizer_tensors(self.optimizer),
        }
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def facts(self) -> dict[str, Any]:
        return {"history": [asdict(report) for report in self.history]}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        def part(name: str) -> dict[str, Tensor]:
            prefix = f"{name}/"
            return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}

        self.head.load_state_dict(part("head"))
        self.average.load_state_dict(part("average"))
        self.best = part("best")
        restore_optimizer(self.optimizer, part("optimizer"))
        self.history = [EpochReport(**report) for report in facts["history"]]

    def result(self) -> Trained:
        head = copy.deepcopy(self.average)
        head.load_state_dict(self.best)
        head.key.weight = torch.nn.Parameter(head.key.weight.detach().clone())  # tied so far, which no file can hold
        return Trained(head.eval(), self.best_epoch, tuple(self.history))


def batch_loss(
    head: AlignmentHead, recipe: Recipe, material: Material, batch: Batch, rows: ContextualRows | None = None
) -> Tensor:
    """The scalar loss of one batch; rows: those that leave the blocks, where these don't learn."""
    label_rows = batch.wordings * len(material.labels) + batch.labels
    messages: Callable[[NDArray[np.int64]], TokenBatch]
    if rows is None:
        messages, label_states = material.messages.select, material.label_states
    else:
        messages, label_states = rows.messages_at, rows.labels
    documents, descriptions = messages(batch.documents), label_states.select(label_rows)
    if len(batch.others):
        descriptions = TokenBatch.concat([descriptions, messages(batch.others)])

    def scored(part: TokenBatch) -> tuple[Tensor, Tensor]:
        lengths = torch.from_numpy(part.kept().lengths).to(head.device).long()
        values = as_tensor(part, head.device)
        return scored_rows(head, values, part) if rows is None else values, lengths

    logits = batch_logits(head, *scored(descriptions), *scored(documents))
    targets = torch.from_numpy(batch.targets).to(head.device)
    labels = len(batch.labels)
    apart = torch.from_numpy(
        batch.document_episodes[:, None] != np.concatenate([batch.label_episodes, batch.other_episodes])
    ).to(head.device)
    logits = logits.masked_fill(apart, APART)
    loss = torch.nn.functional.cross_entropy(logits[:, :labels], targets)
    if len(batch.others):
        positive = torch.from_numpy(batch.targets[:, None] == batch.other_targets[None]).to(head.device)
        same = torch.from_numpy(batch.documents[:, None] == batch.others[None]).to(head.device) | apart[:, labels:]
        loss = loss + recipe.other_texts_weight * other_texts_loss(logits[:, labels:], positive, same)
    if material.message_vectors is not None and material.label_vectors is not None:
        message_vectors, label_vectors = material.message_vectors, material.label_vectors
        side = np.concatenate([label_vectors[label_rows], message_vectors[batch.others]])
        teacher = torch.from_numpy(message_vectors[batch.documents] @ side.T).to(head.device) * recipe.teacher_scale
        teacher = teacher.masked_fill(apart, APART)
        loss = loss + recipe.teacher_weight * teacher_loss(logits, teacher)
    return loss


def validation_figures(head: AlignmentHead, material: Material, validation: Validation) -> tuple[float, float]:
    """(NLL in nats, accuracy) on one validation partition, at temperature 1."""
    probabilities = softmax_at(validation_logits(head, material, validation.documents), 1.0)
    return negative_log_likelihood(probabilities, validation.targets), accuracy(
        probabilities.argmax(axis=1), validation.targets
    )


def _sample_states(material: Material, seed: int) -> Tensor:
    """`[tokens, D]` states of random training messages, about `SAMPLE_TOKENS` of them at most."""
    rows: NDArray[np.int64] = np.concatenate([rows for pool in material.pools for rows in pool.messages.values()])
    rows = np.random.default_rng([seed, 0]).permutation(np.sort(rows))
    mean_length = float(np.mean([store.lengths.mean() for store in material.messages.stores]))
    chosen = np.sort(rows[: max(1, round(SAMPLE_TOKENS / mean_length))])
    return as_tensor(material.messages.select(chosen), torch.device("cpu"))


def _epoch_seed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> 1)
