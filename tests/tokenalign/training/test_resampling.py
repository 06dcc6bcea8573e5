"""Bootstrap intervals and paired comparisons."""

import numpy as np
import pytest

from tokenalign.evaluation import evaluate
from tokenalign.training.resampling import FIGURES, bootstrap_intervals, compare, draw_counts, resampled_figures

CLASSES = 4


def model(seed: int, skill: float, examples: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities, targets) of a model that is right the more often the larger `skill`."""
    targets = np.random.default_rng(7).integers(CLASSES, size=examples)
    logits = np.random.default_rng(seed).normal(size=(examples, CLASSES))
    logits[np.arange(examples), targets] += skill
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True), targets


def test_a_resample_has_the_figures_of_the_examples_drawn() -> None:
    """Each figure of a vector of counts is that of the examples repeated as often."""
    probabilities, targets = model(1, 1.0, examples=60)
    counts = draw_counts(60, resamples=5)
    found = resampled_figures(probabilities, targets, counts)
    labels = tuple("abcd")
    for i, drawn in enumerate(counts):
        rows = np.repeat(np.arange(60), drawn.astype(int))
        expected = evaluate(probabilities[rows], targets[rows], labels)
        for name in FIGURES:
            assert found[name][i] == pytest.approx(getattr(expected, name)), name


def test_counts_are_resamples() -> None:
    """Each draws as many examples as there are, and a seed gives the same again."""
    counts = draw_counts(50, resamples=20, seed=3)
    assert counts.shape == (20, 50)
    assert set(counts.sum(axis=1)) == {50}
    assert (counts == draw_counts(50, resamples=20, seed=3)).all()
    assert (counts != draw_counts(50, resamples=20, seed=4)).any()


def test_an_interval_holds_the_figure_and_narrows_with_examples() -> None:
    """The accuracy's width is about what the normal approximation says, so a quarter of it at sixteen times as many."""
    widths = []
    for examples in (200, 3_200):
        probabilities, targets = model(1, 1.0, examples)
        low, high = bootstrap_intervals(probabilities, targets, draw_counts(examples))["accuracy"]
        accuracy = (probabilities.argmax(axis=1) == targets).mean()
        assert low < accuracy < high
        assert high - low == pytest.approx(2 * 1.96 * np.sqrt(accuracy * (1 - accuracy) / examples), rel=0.15)
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.2)


def test_a_better_model_is_told_from_a_worse_one() -> None:
    """The difference, its interval and the test agree; swapped, they change their sign."""
    (better, targets), (worse, _) = model(1, 2.0), model(2, 0.5)
    counts = draw_counts(len(targets))
    found = compare(better, worse, targets, counts)
    assert found.differences["accuracy"] > 0
    assert found.intervals["accuracy"][0] > 0
    assert found.intervals["nll"][1] < 0
    assert found.p_value < 1e-6
    swapped = compare(worse, better, targets, counts)
    assert swapped.differences["accuracy"] == -found.differences["accuracy"]
    assert (swapped.only_first, swapped.only_second) == (found.only_second, found.only_first)
    assert swapped.p_value == pytest.approx(found.p_value)


def test_mcnemars_test_is_exact() -> None:
    """Of 10 examples that one model alone has right, 1 against 9: 22 of 1,024 outcomes are as uneven."""
    targets = np.zeros(12, dtype=np.int64)
    right, wrong = [0.9, 0.1], [0.1, 0.9]
    first = np.array([right] * 9 + [wrong] + [right] * 2)
    second = np.array([wrong] * 9 + [right] + [right] * 2)
    found = compare(first, second, targets, draw_counts(12, resamples=10))
    assert (found.only_first, found.only_second) == (9, 1)
    assert found.p_value == pytest.approx(22 / 1_024)


def test_equal_models_do_not_differ() -> None:
    """No example speaks for either: p is 1, the interval a point."""
    probabilities, targets = model(1, 1.0)
    found = compare(probabilities, probabilities, targets, draw_counts(len(targets), resamples=50))
    assert found.p_value == 1.0
    assert found.intervals["brier"] == (0.0, 0.0)
