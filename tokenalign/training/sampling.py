"""Which messages, candidate labels and wordings make up each batch of an epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokenalign.training.recipes import Recipe

IndexArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The training messages of one source or domain: label -> rows of its messages.

    weight: how often it is drawn for an episode, in proportion to the others'
    """

    messages: dict[int, IndexArray]
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step trains on.

    documents: `[batch]` message rows; targets: `[batch]` positions in `labels`
    labels: `[candidates]` labels, distinct in each episode; wordings: `[candidates]` the wording drawn for each
    others: `[texts]` message rows that stand in as labels; other_targets: `[texts]` positions in `labels`
    document_episodes, label_episodes, other_episodes: the episode of each; only those of one episode are compared
    """

    documents: IndexArray
    targets: IndexArray
    labels: IndexArray
    wordings: IndexArray
    others: IndexArray
    other_targets: IndexArray
    document_episodes: IndexArray
    label_episodes: IndexArray
    other_episodes: IndexArray


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
            yield _of_episodes(recipe, pools, rng) if recipe.episodes else _balanced(recipe, pools, rng)


def _every_message(recipe: Recipe, pools: Sequence[Pool], rng: np.random.Generator) -> Iterator[Batch]:
    """Each message once, in random order, with all labels as candidates."""
    labels = np.unique([label for pool in pools for label in pool.messages])
    rows = np.concatenate([rows for pool in pools for rows in pool.messages.values()])
    of_row = np.concatenate([np.full(len(rows), label) for pool in pools for label, rows in pool.messages.items()])
    order = rng.permutation(len(rows))
    for start in range(0, len(order), recipe.batch_size):
        chosen = order[start : start + recipe.batch_size]
        targets = np.searchsorted(labels, of_row[chosen])
        wordings, nothing = _draw_wordings(recipe, len(labels), rng), np.zeros(0, dtype=np.int64)
        yield _one_episode(rows[chosen], targets, labels, wordings, nothing, nothing)


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
    return _one_episode(
        np.array(documents, dtype=np.int64),
        np.array([position[label] for label in of_document], dtype=np.int64),
        labels,
        _draw_wordings(recipe, len(labels), rng),
        np.array(others, dtype=np.int64),
        np.array([position[label] for label in of_other], dtype=np.int64),
    )


def _of_episodes(recipe: Recipe, pools: Sequence[Pool], rng: np.random.Generator) -> Batch:
    """As many episodes as the recipe asks for, each of a pool that is drawn by weight."""
    weights = np.array([pool.weight for pool in pools])
    chosen = rng.choice(len(pools), recipe.episodes, p=weights / weights.sum()).tolist()
    parts = [_episode(recipe, pools[i], rng) for i in chosen]
    before = np.cumsum([0, *(len(part.labels) for part in parts)]).tolist()
    numbered = [
        replace(
            part,
            targets=part.targets + start,
            other_targets=part.other_targets + start,
            document_episodes=part.document_episodes + number,
            label_episodes=part.label_episodes + number,
            other_episodes=part.other_episodes + number,
        )
        for number, (part, start) in enumerate(zip(parts, before, strict=False))
    ]
    return Batch(*(np.concatenate([getattr(part, name) for part in numbered]) for name in Batch.__slots__))


def _episode(recipe: Recipe, pool: Pool, rng: np.random.Generator) -> Batch:
    """Candidates drawn from the pool, then messages drawn evenly over the candidates."""
    labels = rng.permutation(np.fromiter(pool.messages, np.int64, len(pool.messages)))[: recipe.candidates]
    targets = rng.integers(len(labels), size=recipe.batch_size // recipe.episodes)
    others = rng.permutation(np.unique(targets))[: recipe.other_texts // recipe.episodes]

    def drawn(positions: IndexArray) -> IndexArray:
        return np.array([rng.choice(pool.messages[label]) for label in labels[positions].tolist()], dtype=np.int64)

    documents, texts = drawn(targets), drawn(others)
    return _one_episode(documents, targets, labels, _draw_wordings(recipe, len(labels), rng), texts, others)


def _draw_wordings(recipe: Recipe, labels: int, rng: np.random.Generator) -> IndexArray:
    if recipe.shared_wording:
        return np.full(labels, rng.integers(len(recipe.wordings)), dtype=np.int64)
    return rng.integers(len(recipe.wordings), size=labels)


def _one_episode(
    documents: IndexArray,
    targets: IndexArray,
    labels: IndexArray,
    wordings: IndexArray,
    others: IndexArray,
    other_targets: IndexArray,
) -> Batch:
    """The batch in which everything is compared."""
    episodes = (np.zeros_like(part) for part in (documents, labels, others))
    return Batch(documents, targets, labels, wordings, others, other_targets, *episodes)
