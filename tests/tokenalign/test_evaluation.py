"""The figures of an evaluation, against values computed by hand, by slow loops and by scikit-learn."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, f1_score, log_loss, precision_recall_fscore_support

from tokenalign.errors import InputError
from tokenalign.evaluation import (
    brier_score,
    confusions,
    cosine_similarities,
    erasure_ratio,
    evaluate,
    expected_calibration_error,
    negative_log_likelihood,
    reliability,
    softmax_at,
)

PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
TARGETS = np.array([0, 1, 1, 2])
LABELS = ("a", "b", "c")


def random_case(examples: int, classes: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities and targets that agree now and then, some classes without an example."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(classes - 1, size=examples)
    logits = rng.normal(size=(examples, classes)) + 1.5 * np.eye(classes)[targets]
    return softmax_at(logits, 1.0), targets


def test_hand_computed_figures() -> None:
    """Every figure of a case of four examples equals what pencil and paper give."""
    found = evaluate(PROBABILITIES, TARGETS, LABELS)
    assert found.accuracy == 0.75
    assert found.micro_f1 == 0.75
    assert [score.f1 for score in found.per_class] == pytest.approx([2 / 3, 2 / 3, 1.0])
    assert found.macro_f1 == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert found.nll == pytest.approx(-(math.log(0.7) + math.log(0.6) + math.log(0.3) + math.log(0.6)) / 4)
    assert found.brier == pytest.approx((0.14 + 0.26 + 0.78 + 0.24) / 4)
    # Confidences .7 | .6, .6 | .5, in bins (.6, .7], (.5, .6] and (.4, .5], with 1, 2 and 0 correct.
    assert found.ece == pytest.approx((0.3 + 0.8 + 0.5) / 4)
    assert (found.examples, found.classes) == (4, 3)


@pytest.mark.parametrize("seed", range(5))
def test_figures_agree_with_scikit_learn(seed: int) -> None:
    """Accuracy, both F1s, per-class scores and NLL are scikit-learn's, classes without an example included."""
    probabilities, targets = random_case(120, 7, seed)
    names = tuple("abcdefg")
    found = evaluate(probabilities, targets, names)
    predictions = probabilities.argmax(axis=1)
    every = list(range(7))
    assert found.accuracy == pytest.approx(accuracy_score(targets, predictions))
    assert found.macro_f1 == pytest.approx(
        f1_score(targets, predictions, average="macro", labels=every, zero_division=0)
    )
    assert found.micro_f1 == pytest.approx(f1_score(targets, predictions, average="micro", labels=every))
    assert found.nll == pytest.approx(log_loss(targets, probabilities, labels=every))
    precision, recall, f1, support = precision_recall_fscore_support(
        targets, predictions, labels=every, zero_division=0
    )
    assert [score.precision for score in found.per_class] == pytest.approx(precision)
    assert [score.recall for score in found.per_class] == pytest.approx(recall)
    assert [score.f1 for score in found.per_class] == pytest.approx(f1)
    assert [score.examples for score in found.per_class] == support.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_brier_and_ece_agree_with_slow_loops(seed: int) -> None:
    """Brier and ECE equal their definitions written as plain loops."""
    probabilities, targets = random_case(90, 5, seed)
    brier = sum(
        sum((probabilities[i, c] - (c == targets[i])) ** 2 for c in range(5)) for i in range(len(targets))
    ) / len(targets)
    assert brier_score(probabilities, targets) == pytest.approx(brier)
    ece = 0.0
    for low in range(10):
        members = [i for i in range(len(targets)) if low / 10 < probabilities[i].max() <= (low + 1) / 10]
        if members:
            confidence = sum(probabilities[i].max() for i in members) / len(members)
            right = sum(probabilities[i].argmax() == targets[i] for i in members) / len(members)
            ece += len(members) / len(targets) * abs(right - confidence)
    assert expected_calibration_error(probabilities, targets) == pytest.approx(ece)


def test_certain_answers() -> None:
    """A certain right answer costs nothing, a certain wrong one 2 in Brier, 1 in ECE and a finite NLL."""
    certain = np.eye(2)
    right, wrong = np.array([0, 1]), np.array([1, 0])
    assert brier_score(certain, right) == expected_calibration_error(certain, right) == 0
    assert negative_log_likelihood(certain, right) == 0
    assert brier_score(certain, wrong) == 2
    assert expected_calibration_error(certain, wrong) == 1
    assert 700 < negative_log_likelihood(certain, wrong) < 710


def test_arrays_that_do_not_fit_are_refused() -> None:
    """A missing column, a missing row and no rows at all are errors that state the shapes."""
    for probabilities, targets in [
        (PROBABILITIES[:, :2], TARGETS),
        (PROBABILITIES[:3], TARGETS),
        (PROBABILITIES[:0], TARGETS[:0]),
    ]:
        with pytest.raises(InputError, match="probabilities have shape"):
            evaluate(probabilities, targets, LABELS)


def test_softmax_at_a_temperature() -> None:
    """A temperature divides the logits, and huge logits stay finite."""
    np.testing.assert_allclose(softmax_at(np.array([[2.0, 0.0]]), 2.0), [[math.e / (1 + math.e), 1 / (1 + math.e)]])
    np.testing.assert_array_equal(softmax_at(np.array([[1e4, 0.0]]), 0.01), [[1.0, 0.0]])


def test_cosines_of_unit_vectors() -> None:
    """Rows are documents and columns are labels."""
    found = cosine_similarities(np.array([[1.0, 0.0], [0.6, 0.8]]), np.array([[0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]]))
    np.testing.assert_allclose(found.astype(np.float64), [[0.0, 1.0, -1.0], [0.8, 0.6, -0.6]])


@pytest.mark.parametrize(
    ("matched", "random", "ratio"),
    [([4.0, 2.0], [1.0, 2.0], 2.0), ([1.0], [-0.5], math.inf), ([-1.0], [-0.5], 0.0), ([0.0], [0.0], 0.0)],
)
def test_erasure_ratio(matched: list[float], random: list[float], ratio: float) -> None:
    """The ratio is of the means, infinite when only matched words cost something, and never negative by a sign pair."""
    assert erasure_ratio(np.array(matched), np.array(random)) == ratio


def test_reliability_bins_are_those_of_the_calibration_error() -> None:
    """Each bin's mean confidence and accuracy; empty ones are left out; a confidence at an edge lies below it."""
    probabilities = np.array([[0.6, 0.4], [0.55, 0.45], [0.9, 0.1], [0.05, 0.95]])
    bins = reliability(probabilities, np.array([0, 1, 0, 1]))
    assert [(b.low, b.high, b.examples) for b in bins] == [(0.5, 0.6, 2), (0.8, 0.9, 1), (0.9, 1.0, 1)]
    assert bins[0].confidence == pytest.approx(0.575)
    assert [b.accuracy for b in bins] == [0.5, 1.0, 1.0]


def test_confusions_are_the_most_frequent_wrong_answers() -> None:
    """By how often; the share is of the right label's examples; right answers are none."""
    targets = np.array([0, 0, 0, 0, 1, 1, 2])
    found = confusions(np.array([1, 1, 2, 0, 0, 1, 2]), targets, ("a", "b", "c"), 2)
    assert [(c.label, c.predicted, c.examples, c.share) for c in found] == [("a", "b", 2, 0.5), ("a", "c", 1, 0.25)]
    assert confusions(targets, targets, ("a", "b", "c"), 5) == ()
