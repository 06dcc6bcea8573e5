"""Training of a linear head on vectors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tokenalign.errors import TrainingError
from tokenalign.training.linear_trainer import LinearEpoch, LinearRecipe, Pooled, text_logits, text_nll, train_linear

FAST = LinearRecipe(learning_rate=0.05, batch_size=32, max_epochs=30)


def pooled(texts: int, seed: int, *, several: bool, windows: int = 1) -> Pooled:
    """Vectors in which a label shows in one channel, off centre and scaled, in one window of each text."""
    rng = np.random.default_rng(seed)
    holds = rng.random((texts, 3)) < 0.4 if several else np.eye(3, dtype=bool)[rng.integers(0, 3, texts)]
    counts = np.full(texts, windows, dtype=np.int32)
    vectors = rng.normal(size=(texts * windows, 5)).astype(np.float32)
    vectors[::windows, :3] += 4 * holds
    return Pooled((vectors * [1, 10, 0.1, 1, 1] + [0, 50, 0, 0, 9]).astype(np.float32), counts, holds)


@pytest.mark.parametrize("several", [False, True])
def test_labels_are_learned(several: bool) -> None:
    """One a text or any number, from channels of any place and scale."""
    mode: Any = "multi_label" if several else "single_label"
    train, validation, test = (pooled(n, n, several=several) for n in (400, 101, 102))
    logits = text_logits(train_linear(FAST, mode, 1, train, validation).head, test)
    right = (logits > 0) == test.holds if several else logits.argmax(axis=1) == test.holds.argmax(axis=1)
    assert right.mean() > 0.9


def test_the_best_epoch_is_kept() -> None:
    """By the NLL of the validation texts, and training ends when that stays higher."""
    train, validation = pooled(60, 1, several=True), pooled(60, 2, several=True)
    told: list[LinearEpoch] = []
    trained = train_linear(replace(FAST, max_epochs=200), "multi_label", 1, train, validation, on_epoch=told.append)
    nlls = [epoch.validation_nll for epoch in trained.history]
    assert tuple(told) == trained.history
    assert trained.best_epoch == 1 + int(np.argmin(nlls)) < len(nlls) == trained.best_epoch + FAST.patience
    assert text_nll(text_logits(trained.head, validation), validation.holds, "multi_label") == pytest.approx(
        min(nlls), abs=1e-5
    )


def test_a_seed_gives_the_same_weights_again() -> None:
    """Bit by bit; another seed gives others."""
    train, validation = pooled(60, 1, several=False), pooled(60, 2, several=False)
    first, again, other = (
        train_linear(replace(FAST, max_epochs=3), "single_label", seed, train, validation).head.score.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_window_is_an_example_with_its_texts_labels() -> None:
    """Windows count by themselves in training, and together, by their largest logit, in validation."""
    train, validation = pooled(80, 1, several=True, windows=2), pooled(30, 2, several=True, windows=2)
    apart = Pooled(train.vectors, np.ones(160, dtype=np.int32), np.repeat(train.holds, 2, axis=0))
    first, second = (train_linear(FAST, "multi_label", 1, data, validation) for data in (train, apart))
    assert torch.equal(first.head.score.weight, second.head.score.weight)
    logits = text_logits(first.head, validation)
    each = text_logits(first.head, Pooled(validation.vectors, np.ones(60, dtype=np.int32), np.zeros((60, 3), bool)))
    np.testing.assert_array_equal(logits, each.reshape(30, 2, 3).max(axis=1))


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    """With what to change."""
    train = pooled(60, 1, several=False)
    train.vectors[3, 0] = np.nan
    with pytest.raises(TrainingError, match="lower --learning-rate"):
        train_linear(FAST, "single_label", 1, train, pooled(60, 2, several=False))


def test_rare_labels_start_at_their_frequency() -> None:
    """One step in, two labels in a hundred are told as well as by their frequency, and soon better."""
    rng = np.random.default_rng(0)
    holds = rng.random((2_000, 20)) < 0.02
    vectors = (rng.normal(size=(2_000, 20)) + 4 * holds).astype(np.float32)
    parts = [
        Pooled(vectors[run], np.ones(1_000, dtype=np.int32), holds[run]) for run in (slice(1_000), slice(1_000, None))
    ]
    trained = train_linear(LinearRecipe(max_epochs=60), "multi_label", 1, *parts)
    rate = holds.mean()
    of_frequency = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert trained.history[0].validation_nll < 1.05 * of_frequency
    assert trained.history[-1].validation_nll < 0.7 * of_frequency
