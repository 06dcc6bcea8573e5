"""The training of a linear head on cached vectors: epochs of AdamW, the best one kept by validation NLL.

It takes seconds, so there is nothing to resume; what takes long, the vectors, is kept on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tokenalign.errors import TrainingError
from tokenalign.evaluation import FloatArray, negative_log_likelihood, pair_negative_log_likelihood, softmax_at
from tokenalign.linear.config import Mode
from tokenalign.linear.head import LinearHead, label_wise_maximum, window_logits

SMALLEST_SPREAD = 1e-6  # of a channel; a smaller one says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRecipe:
    """How a linear head is trained. patience: epochs without a lower validation NLL to end after."""

    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    batch_size: int = 64
    max_epochs: int = 300
    patience: int = 5


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """Texts as vectors: `[windows, D]`, all windows of a text behind each other.

    counts: `[texts]`, windows of each; holds: `[texts, labels]`
    """

    vectors: NDArray[np.float32]
    counts: NDArray[np.int32]
    holds: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LinearEpoch:
    """What an epoch gave: the mean loss over its batches, and the NLL of the validation texts after it."""

    epoch: int
    loss: float
    validation_nll: float


@dataclass(frozen=True, slots=True, eq=False)
class LinearTrained:
    """The head of the best epoch, and the report of every epoch."""

    head: LinearHead
    best_epoch: int
    history: tuple[LinearEpoch, ...]


OnLinearEpoch = Callable[[LinearEpoch], None]


def train_linear(
    recipe: LinearRecipe,
    mode: Mode,
    seed: int,
    train: Pooled,
    validation: Pooled,
    *,
    on_epoch: OnLinearEpoch | None = None,
) -> LinearTrained:
    """The trained head; the same arrays, seed and number of threads give the same weights.

    Each window is an example with its text's labels, as on the Qwen3.5 cards; the encoder, which they train too, stays
    frozen. Vectors are centred and scaled by the training windows' mean and deviation, and the head that is given back
    takes that in. It starts from the labels' frequencies: the problem is convex, so no start is better in the end, but
    the bias of a rare label would take many epochs to get there. Raises `TrainingError` where the loss is no number.
    """
    scaler = _Scaler.of(train.vectors)
    inputs = torch.from_numpy(scaler.scaled(train.vectors))
    targets = torch.from_numpy(np.repeat(train.holds, train.counts, axis=0))
    if mode == "single_label":
        targets = targets.to(torch.int8).argmax(dim=1)
    scaled = Pooled(scaler.scaled(validation.vectors), validation.counts, validation.holds)
    head = _start(inputs.shape[1], np.repeat(train.holds, train.counts, axis=0))
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    history: list[LinearEpoch] = []
    best, best_epoch, best_nll = head.state_dict(), 0, float("inf")
    for epoch in range(1, recipe.max_epochs + 1):
        order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(len(inputs)))
        loss = _run_epoch(head, optimizer, inputs, targets, order, recipe.batch_size)
        nll = text_nll(text_logits(head, scaled), scaled.holds, mode)
        history.append(LinearEpoch(epoch, loss, nll))
        if on_epoch is not None:
            on_epoch(history[-1])
        if nll < best_nll:
            best, best_epoch, best_nll = {k: v.clone() for k, v in head.state_dict().items()}, epoch, nll
        elif epoch - best_epoch >= recipe.patience:
            break
    head.load_state_dict(best)
    return LinearTrained(scaler.taken_in(head), best_epoch, tuple(history))


def text_logits(head: LinearHead, pooled: Pooled) -> FloatArray:
    """`[texts, labels]` logits, each the label's largest over the text's windows."""
    return label_wise_maximum(window_logits(head, torch.from_numpy(pooled.vectors)), pooled.counts)


def text_nll(logits: FloatArray, holds: NDArray[np.bool_], mode: Mode) -> float:
    """The NLL in nats: of each text's label under the softmax, or over all pairs of text and label."""
    if mode == "single_label":
        return negative_log_likelihood(softmax_at(logits, 1.0), holds.argmax(axis=1))
    sigmoid = np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
    return pair_negative_log_likelihood(sigmoid, holds)


def _start(width: int, holds: NDArray[np.bool_]) -> LinearHead:
    """A head that gives every vector the labels' log-odds, each label held by one window more than counted."""
    head = LinearHead(width, holds.shape[1])
    positives = holds.sum(axis=0) + 1.0
    torch.nn.init.zeros_(head.score.weight)
    with torch.no_grad():
        head.score.bias.copy_(torch.from_numpy(np.log(positives / (len(holds) + 2 - positives))))
    return head


def _run_epoch(
    head: LinearHead, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, order: Tensor, batch_size: int
) -> float:
    """The mean loss over the batches: cross-entropy of label numbers, or binary cross-entropy of `[.., labels]`."""
    losses = []
    for rows in torch.split(order, batch_size):
        logits = head(inputs[rows])
        wanted = targets[rows]
        loss = (
            F.cross_entropy(logits, wanted)
            if wanted.ndim == 1
            else F.binary_cross_entropy_with_logits(logits, wanted.float())
        )
        if not torch.isfinite(loss):
            raise TrainingError("the loss is no number any more; lower --learning-rate")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses))


@dataclass(frozen=True, slots=True, eq=False)
class _Scaler:
    mean: NDArray[np.float32]
    spread: NDArray[np.float32]

    @classmethod
    def of(cls, vectors: NDArray[np.float32]) -> "_Scaler":
        spread = vectors.std(axis=0, dtype=np.float64).astype(np.float32)
        return cls(
            vectors.mean(axis=0, dtype=np.float64).astype(np.float32),
            np.where(spread > SMALLEST_SPREAD, spread, np.float32(1.0)),
        )

    def scaled(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.ascontiguousarray((vectors - self.mean) / self.spread, dtype=np.float32)

    def taken_in(self, head: LinearHead) -> LinearHead:
        """The head that gives the same logits of vectors as they are."""
        weight = head.score.weight.detach().double() / torch.from_numpy(self.spread).double()
        bias = head.score.bias.detach().double() - weight @ torch.from_numpy(self.mean).double()
        whole = LinearHead(head.score.in_features, head.score.out_features)
        whole.load_state_dict({"score.weight": weight.float(), "score.bias": bias.float()})
        return whole.eval()
