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
    """With thousands of examples the NLL at the temperature found is the lowest of a fine grid, but for a hair."""
    logits, targets = drawn(2_000)
    for usual in (0.05, 1.0):
        found = negative_log_likelihood(softmax_at(logits, fit_temperature(logits, targets, usual)), targets)
        grid = [negative_log_likelihood(softmax_at(logits, t), targets) for t in np.geomspace(LOWEST, HIGHEST, 400)]
        assert found <= min(grid) + 1e-4


@pytest.mark.parametrize("examples", [1, 10, 600])
@pytest.mark.parametrize("usual", [0.05, 1.0])
@pytest.mark.parametrize("lead", [0.3, 3.0, 20.0])
def test_without_a_mistake_the_prior_holds_the_temperature(examples: int, usual: float, lead: float) -> None:
    """Of n right answers, each leading by g, it is where n·(g / T)·sigmoid(-g / T) = ln(usual / T) / ln(2)²."""
    targets = np.arange(examples) % 2
    found = fit_temperature(lead * usual * np.eye(2)[targets], targets, usual)
    lead_at = lead * usual / found
    pull, push = examples * lead_at / (1 + np.exp(lead_at)), np.log(usual / found) / np.log(2) ** 2
    assert pull == pytest.approx(push, rel=1e-3, abs=1e-4)
    assert LOWEST < found < usual * (1 + 1e-6)


def test_ten_easy_messages_prove_little_and_six_hundred_more() -> None:
    """What is answered right by far leaves the temperature alone where it is little; much of it makes it sharper."""
    logits = 8.0 * np.eye(4)[np.arange(600) % 4]
    few, many = (fit_temperature(logits[:n], np.arange(n) % 4) for n in (12, 600))
    assert few == pytest.approx(1.0, abs=0.05)
    assert many < 0.8


def test_temperatures_stay_in_their_bounds() -> None:
    """Logits of many examples that are always wrong end at the upper bound, those that hardly differ at the lower."""
    targets = np.arange(5_000) % 2
    logits = np.eye(2)[targets]
    assert fit_temperature(logits * 500, 1 - targets) == pytest.approx(HIGHEST, rel=1e-3)
    assert fit_temperature(logits * 1e-3, targets) == pytest.approx(LOWEST, rel=1e-3)


@pytest.mark.parametrize(
    ("examples", "mistakes", "words"),
    [
        (18, 6, "rest on 18 messages, which is few: .* no calibrated min_score, which takes 19"),
        (19, 6, "fitted on 19 messages, which is few: take"),
        (600, 0, "fitted on 600 messages of which 0 are answered wrong"),
        (600, 1, "of which 1 is answered wrong, which tells little"),
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
    assert fitted is not None
    best = softmax(logits).max(axis=1)
    assert fitted.labels == 4
    assert (best >= fitted.min_score).mean() >= 0.95
    assert (best >= np.nextafter(np.float32(fitted.min_score), np.float32(1))).mean() < 0.951
    assert fitted.multi_label_min_score is not None
    independent = independent_scores(logits, MultiLabelCalibration(scale=0.8, bias=-1)).max(axis=1)
    assert 0.95 <= (independent >= fitted.multi_label_min_score).mean() < 0.952
    half, alone = fit_abstention(logits, None, kept=0.5), fit_abstention(logits, None)
    assert half is not None
    assert alone is not None
    assert alone.multi_label_min_score is None
    assert half.min_score > alone.min_score


@pytest.mark.parametrize("examples", [19, 20, 38, 39, 200])
def test_new_examples_reach_the_limit_as_often_as_it_says(examples: int) -> None:
    """Over many draws of n examples and a new one, the new one reaches the limit in at least 95 %, and hardly more."""
    rng = np.random.default_rng(examples)
    reached = []
    for _ in range(2_000):
        logits = rng.normal(size=(examples + 1, 3)) * 2
        fitted = fit_abstention(logits[:-1], None)
        assert fitted is not None
        reached.append(softmax(logits[-1:]).max() >= fitted.min_score)
    assert 0.95 - 0.015 < np.mean(reached) < 0.95 + 1 / (examples + 1) + 0.015


def test_too_few_examples_give_no_limit() -> None:
    """95 % can't be kept by any of 18 scores, by the lowest of 19."""
    logits = np.random.default_rng(1).normal(size=(19, 3))
    assert fit_abstention(logits[:18], None) is None
    fitted = fit_abstention(logits, None)
    assert fitted is not None
    assert fitted.min_score == softmax(logits).max(axis=1).min()


def test_no_limit_is_nearer_to_1_than_examples_can_tell() -> None:
    """Twenty certain answers give 21 / 22, so that one that is nearly certain still has its label."""
    logits = 500.0 * np.eye(2)[np.arange(20) % 2]
    fitted = fit_abstention(logits, MultiLabelCalibration(scale=1.0, bias=0.0))
    assert fitted is not None
    assert fitted.min_score == fitted.multi_label_min_score == 21 / 22
