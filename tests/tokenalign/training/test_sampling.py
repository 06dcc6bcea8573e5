"""Batches: every message once, or balanced over drawn candidates."""

from dataclasses import replace

import numpy as np

from tokenalign.training.recipes import Recipe
from tokenalign.training.sampling import Batch, Pool, epoch_batches, epoch_length

POOLS = (
    Pool({0: np.arange(0, 7), 2: np.arange(7, 12), 3: np.arange(12, 50)}),
    Pool({1: np.arange(50, 58), 2: np.arange(58, 60)}),  # label 2 stands in both
)
OWNER = {int(row): label for pool in POOLS for label, rows in pool.messages.items() for row in rows}


def check(batch: Batch) -> None:
    """The promises that hold for every batch."""
    for episode in np.unique(batch.label_episodes):
        labels = batch.labels[batch.label_episodes == episode]
        assert len(np.unique(labels)) == len(labels)
    assert len(batch.labels) == len(batch.wordings)
    assert [OWNER[row] for row in batch.documents.tolist()] == batch.labels[batch.targets].tolist()
    assert [OWNER[row] for row in batch.others.tolist()] == batch.labels[batch.other_targets].tolist()


def test_every_message_comes_once(card_like: Recipe) -> None:
    """Without sampling, an epoch has each message once, in another order each time, with all labels as candidates."""
    recipe = replace(card_like, batch_size=16)
    orders = []
    for seed in (1, 2):
        batches = list(epoch_batches(recipe, POOLS, np.random.default_rng(seed)))
        for batch in batches:
            check(batch)
            assert batch.labels.tolist() == [0, 1, 2, 3]
        assert [len(batch.documents) for batch in batches] == [16, 16, 16, 12]
        assert len(batches) == epoch_length(recipe, POOLS)
        orders.append(np.concatenate([batch.documents for batch in batches]))
        assert sorted(orders[-1].tolist()) == list(range(60))
    assert orders[0].tolist() != orders[1].tolist()


def test_sampled_batches_are_balanced_over_sources_and_labels(everything: Recipe) -> None:
    """Each source gives half a batch, candidates are as many as asked for, and rare labels come as often as others."""
    recipe = replace(everything, epoch_batches=300, candidates=2, batch_size=16, other_texts=4)
    batches = list(epoch_batches(recipe, POOLS, np.random.default_rng(0)))
    assert len(batches) == epoch_length(recipe, POOLS) == 300
    for batch in batches:
        check(batch)
        assert len(batch.documents) == 16
        assert int((batch.documents < 50).sum()) == 8
        assert 2 <= len(batch.labels) <= 4
        assert len(batch.others) <= 4
        assert len(np.unique(batch.other_targets[: len(batch.others) // 2])) == len(batch.others) // 2
    seen = np.concatenate([batch.documents for batch in batches])
    shares = [np.isin(seen, POOLS[0].messages[label]).mean() for label in (0, 2, 3)]
    assert max(shares) - min(shares) < 0.05
    wordings = np.concatenate([batch.wordings for batch in batches])
    assert abs(wordings.mean() - 0.5) < 0.1


def test_episodes_are_of_one_pool_and_balanced_over_its_labels(comparison: Recipe) -> None:
    """An episode is of one pool, heavier ones come more often, and rare labels as often as others."""
    pools = (replace(POOLS[0], weight=3.0), POOLS[1])
    recipe = replace(comparison, epoch_batches=300, episodes=2, candidates=2, batch_size=16, other_texts=4)
    batches = list(epoch_batches(recipe, pools, np.random.default_rng(0)))
    assert len(batches) == epoch_length(recipe, pools) == 300
    first = 0
    for batch in batches:
        check(batch)
        assert np.bincount(batch.document_episodes).tolist() == [8, 8]
        assert np.bincount(batch.label_episodes).tolist() == [2, 2]
        for episode in (0, 1):
            labels = np.flatnonzero(batch.label_episodes == episode)
            rows = batch.documents[batch.document_episodes == episode]
            others = batch.others[batch.other_episodes == episode]
            assert len({bool(row < 50) for row in (*rows, *others)}) == 1
            assert set(batch.targets[batch.document_episodes == episode]) <= set(labels)
            assert set(batch.other_targets[batch.other_episodes == episode]) <= set(labels)
            assert len(set(batch.wordings[labels])) == 1
            first += bool(rows[0] < 50)
    assert abs(first / 600 - 0.75) < 0.05
    seen = np.concatenate([batch.documents for batch in batches])
    shares = [np.isin(seen, POOLS[0].messages[label]).mean() for label in (0, 2, 3)]
    assert max(shares) - min(shares) < 0.05
    wordings = np.concatenate([batch.wordings for batch in batches])
    assert abs(wordings.mean() - 0.5) < 0.1


def test_the_same_generator_gives_the_same_batches(recipe: Recipe) -> None:
    """Batches follow from the generator alone."""
    one, two = (list(epoch_batches(recipe, POOLS, np.random.default_rng([42, 3]))) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        for name in Batch.__slots__:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
