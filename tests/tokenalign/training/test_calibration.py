"""The temperature, and the scaling for independent scores."""

import re

import numpy as np
import pytest

from tokenalign.config import MultiLabelCalibration
from tokenalign.evaluation import negative_log_likelihood, pair_negative_log_likelihood, softmax_at
from tokenalign.results import independent_scores, softmax
from tokenalign.training.calibration import (
    HIGHEST,
    LOWEST,
    fit_abstention,
    fit_multi_label,
    fit_temperature,
    multi_label_figures,
    scarcity,
)


@pytest.mark.parametrize("truth", [0.3, 1.0, 7.0])
def test_the_true_temperature_is_found(truth: float) -> None:
    """Labels drawn from softmax(logits / T) give back T."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20_000, 5)) * 3
    probabilities = softmax_at(logits, truth)
    targets = (probabilities.cumsum(axis=1) < rng.random((len(logits), 1))).sum(axis=1)
    assert fit_temperature(logits, targets) == pytest.approx(truth, rel=0.05)


def test_no_grid_point_is_better() -> None:
    """The NLL at the temperature found is within a hair of the lowest of a fine grid: one doubt in 2,002 is little."""
    logits, targets = drawn(2_000)
    found = negative_log_likelihood(softmax_at(logits, fit_temperature(logits, targets)), targets)
    grid = [negative_log_likelihood(softmax_at(logits, t), targets) for t in np.geomspace(LOWEST, HIGHEST, 400)]
    assert found <= min(grid) + 1e-5


@pytest.mark.parametrize("examples", [4, 20, 600])
@pytest.mark.parametrize("classes", [2, 5])
def test_examples_without_a_mistake_leave_room_for_one(examples: int, classes: int) -> None:
    """However far apart the logits of n right answers are, the probability is (n + 1) / (n + 2), no more."""
    targets = np.arange(examples) % classes
    for lead in (0.5, 12.0):
        logits = lead * np.eye(classes)[targets]
        sure = softmax_at(logits, fit_temperature(logits, targets)).max(axis=1)
        assert sure == pytest.approx((examples + 1) / (examples + 2), abs=1e-6)
    two = 3.0 * np.eye(2)[np.arange(examples) % 2]
    assert fit_temperature(two, np.arange(examples) % 2) == pytest.approx(3 / np.log(examples + 1), rel=1e-6)


def test_temperatures_stay_in_their_bounds() -> None:
    """Logits that are always wrong end at the upper bound, those that hardly differ at the lower one."""
    logits = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert fit_temperature(logits, np.array([1, 0])) == pytest.approx(HIGHEST, rel=1e-3)
    assert fit_temperature(logits * 1e-4, np.array([0, 1])) == pytest.approx(LOWEST, rel=1e-3)


@pytest.mark.parametrize(
    ("examples", "mistakes", "words"),
    [
        (12, 6, "fitted on 12 messages, which is few"),
        (600, 0, "of the 600 messages .* 0 are answered wrong"),
        (600, 1, "1 is answered wrong, so how sure"),
        (600, 5, None),
        (50, 5, None),
    ],
)
def test_what_is_told_of_scarce_messages_and_mistakes(examples: int, mistakes: int, words: str | None) -> None:
    """Few messages are named first, then few mistakes among many; nothing where there are enough of both."""
    told = scarcity({"validation_calibrate": {"examples": examples, "accuracy": 1 - mistakes / examples}})
    assert told is None if words is None else re.search(words, told or "")
    assert scarcity({}) is None


def drawn(examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of four classes that rise where a class is the target."""
    rng = np.random.default_rng(3)
    targets = rng.integers(4, size=examples)
    return rng.normal(size=(examples, 4)) * 2 + 3 * (np.arange(4) == targets[:, None]), targets


def test_no_other_scaling_has_a_lower_nll() -> None:
    """Neither another scale nor another bias near the fitted ones does better on the pairs fitted on."""
    logits, targets = drawn(2_000)
    holds = np.arange(4) == targets[:, None]
    found = fit_multi_label(logits, targets)
    assert found is not None

    def nll(scale: float, bias: float) -> float:
        return pair_negative_log_likelihood(1 / (1 + np.exp(-(scale * logits + bias))), holds)

    best = nll(found.scale, found.bias)
    for scale, bias in ((0.9, 0), (1.1, 0), (1, 0.1), (1, -0.1), (1.1, 0.1)):
        assert nll(found.scale * scale, found.bias + bias) > best


def test_fitted_probabilities_are_as_frequent_as_they_say() -> None:
    """On average over all pairs the probability is the share that holds: one class in four."""
    logits, targets = drawn(2_000)
    found = fit_multi_label(logits, targets)
    assert found is not None
    assert independent_scores(logits, found).mean() == pytest.approx(0.25, abs=1e-3)


def test_logits_without_an_error_still_give_a_finite_scaling() -> None:
    """Where every pair is right, the smoothed targets keep the scale from growing without end."""
    logits, targets = np.eye(3) * 8, np.arange(3)
    found = fit_multi_label(logits, targets)
    assert found is not None
    assert 0 < found.scale < 10


def test_logits_that_fall_with_being_right_give_none() -> None:
    """A scaling that turns the order of the labels round is none."""
    logits, targets = drawn(200)
    assert fit_multi_label(-logits, targets) is None


def test_figures_are_over_pairs() -> None:
    """NLL and ECE of probabilities that are known by heart."""
    calibration = MultiLabelCalibration(scale=1.0, bias=0.0)
    figures = multi_label_figures(np.zeros((3, 2)), np.array([0, 1, 1]), calibration)
    assert figures == {"examples": 3, "classes": 2, "pair_nll": pytest.approx(np.log(2)), "pair_ece": 0.0}
    sure = multi_label_figures(np.array([[50.0, 50.0]]), np.array([0]), calibration)
    assert sure["pair_ece"] == pytest.approx(0.5)


def test_the_limit_keeps_the_share_it_says() -> None:
    """Of the examples it was fitted on 95 % reach it, and no higher score of theirs would keep as many."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1_000, 4)) * 3
    fitted = fit_abstention(logits, MultiLabelCalibration(scale=0.8, bias=-1))
    best = softmax(logits).max(axis=1)
    assert fitted.labels == 4
    assert (best >= fitted.min_score).mean() >= 0.95
    assert (best >= np.nextafter(np.float32(fitted.min_score), np.float32(1))).mean() < 0.951
    assert fitted.multi_label_min_score is not None
    independent = independent_scores(logits, MultiLabelCalibration(scale=0.8, bias=-1)).max(axis=1)
    assert 0.95 <= (independent >= fitted.multi_label_min_score).mean() < 0.952
    assert fit_abstention(logits, None).multi_label_min_score is None
    assert fit_abstention(logits, None, kept=0.5).min_score > fitted.min_score
