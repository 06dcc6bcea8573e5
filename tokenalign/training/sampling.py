"""Which messages, candidate labels and wordings make up each batch of an epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenalign.training.recipes import Recipe

IndexArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The training messages of one source: label -> rows of its messages."""

    messages: dict[int, IndexArray]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step trains on.

    documents: `[batch]` message rows; targets: `[batch]` positions in `labels`
    labels: `[candidates]` distinct labels; wordings: `[candidates]` the wording drawn for each
    others: `[texts]` message rows that stand in as labels; other_targets: `[texts]` positions in `labels`
    """

    documents: IndexArray
    targets: IndexArray
    labels: IndexArray
    wordings: IndexArray
    others: IndexArray
    other_targets: IndexArray


def epoch_length(recipe: Recipe, pools: Sequence[Pool]) -> int:
    """How many batches an epoch has."""
    if recipe.epoch_batches is not None:
        return recipe.epoch_batches
    messages = sum(len(rows) for pool in pools for rows in pool.messages.values())
    return -(-messages // recipe.batch_size)


def epoch_batches(recipe: Recipe, pools: Sequence[Pool], rng: np.random.Generator) -> Iterator[Batch]:
    """The batches of one epoch; the same generator state gives the same batches."""
    if recipe.epoch_batches is None:
        yield from _every_message(recipe, pools, rng)
    else:
        for _ in range(recipe.epoch_batches):
            yield _balanced(recipe, pools, rng)


def _every_message(recipe: Recipe, pools: Sequence[Pool], rng: np.random.Generator) -> Iterator[Batch]:
    """Each message once, in random order, with all labels as candidates."""
    labels = np.unique([label for pool in pools for label in pool.messages])
    rows = np.concatenate([rows for pool in pools for rows in pool.messages.values()])
    of_row = np.concatenate([np.full(len(rows), label) for pool in pools for label, rows in pool.messages.items()])
    order = rng.permutation(len(rows))
    for start in range(0, len(order), recipe.batch_size):
        chosen = order[start : start + recipe.batch_size]
        targets = np.searchsorted(labels, of_row[chosen])
        yield Batch(rows[chosen], targets, labels, _draw_wordings(recipe, len(labels), rng), *_no_others())


def _balanced(recipe: Recipe, pools: Sequence[Pool], rng: np.random.Generator) -> Batch:
    """Candidates drawn from each source, then messages drawn evenly over the candidates."""
    documents: list[int] = []
    of_document: list[int] = []
    others: list[int] = []
    of_other: list[int] = []
    candidates: dict[int, None] = {}  # an ordered set: two sources may share a label
    for pool in pools:
        names = np.fromiter(pool.messages, np.int64, len(pool.messages))
        drawn = rng.permutation(names)[: recipe.candidates]
        candidates.update(dict.fromkeys(drawn.tolist()))
        picked = rng.choice(drawn, recipe.batch_size // len(pools)).tolist()
        documents += [int(rng.choice(pool.messages[label])) for label in picked]
        of_document += picked
        matched = rng.permutation(sorted(set(picked)))[: recipe.other_texts // len(pools)].tolist()
        others += [int(rng.choice(pool.messages[label])) for label in matched]
        of_other += matched
    labels = np.fromiter(candidates, np.int64, len(candidates))
    position = {label: i for i, label in enumerate(labels.tolist())}
    return Batch(
        np.array(documents, dtype=np.int64),
        np.array([position[label] for label in of_document], dtype=np.int64),
        labels,
        _draw_wordings(recipe, len(labels), rng),
        np.array(others, dtype=np.int64),
        np.array([position[label] for label in of_other], dtype=np.int64),
    )


def _draw_wordings(recipe: Recipe, labels: int, rng: np.random.Generator) -> IndexArray:
    return rng.integers(len(recipe.wordings), size=labels)


def _no_others() -> tuple[IndexArray, IndexArray]:
    return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
