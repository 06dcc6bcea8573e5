"""How good answers are: accuracy, F1, calibration and whether the matches mean something, as free functions on arrays.

Shapes throughout: probabilities and logits `[examples, classes]`, targets and predictions `[examples]` class positions.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.errors import InputError

CALIBRATION_BINS = 10

FloatArray = NDArray[np.floating[Any]]
IndexArray = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class ClassScore:
    """One class's counts and scores; a score whose denominator is zero is 0."""

    label: str
    examples: int
    predicted: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The figures of one model on one set of examples. Lower is better for nll, brier and ece."""

    examples: int
    classes: int
    accuracy: float
    macro_f1: float
    micro_f1: float
    nll: float
    brier: float
    ece: float
    per_class: tuple[ClassScore, ...]

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """The examples whose confidence lies in (low, high]: how many, their mean confidence and their accuracy."""

    low: float
    high: float
    examples: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Confusion:
    """How often `predicted` was answered where `label` was right, and which share of that label's examples it is."""

    label: str
    predicted: str
    examples: int
    share: float


def evaluate(probabilities: FloatArray, targets: IndexArray, labels: tuple[str, ...]) -> Metrics:
    """All figures of `probabilities`, the columns being `labels`; `InputError` where the arrays don't fit."""
    if probabilities.ndim != 2 or probabilities.shape != (len(targets), len(labels)) or not len(targets):
        raise InputError(
            f"probabilities have shape {probabilities.shape}, but there are {len(targets)} targets and "
            f"{len(labels)} labels; give one row per target and one column per label, at least one row"
        )
    predictions = probabilities.argmax(axis=1)
    per_class = class_scores(predictions, targets, labels)
    return Metrics(
        examples=len(targets),
        classes=len(labels),
        accuracy=accuracy(predictions, targets),
        macro_f1=float(np.mean([score.f1 for score in per_class])),
        micro_f1=micro_f1(predictions, targets, len(labels)),
        nll=negative_log_likelihood(probabilities, targets),
        brier=brier_score(probabilities, targets),
        ece=expected_calibration_error(probabilities, targets),
        per_class=per_class,
    )


def accuracy(predictions: IndexArray, targets: IndexArray) -> float:
    """The share of examples whose prediction is the target."""
    return float((predictions == targets).mean())


def class_counts(
    predictions: IndexArray, targets: IndexArray, classes: int
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """(true positives, predicted, actual) of each class, `[classes]` each."""
    correct = np.bincount(targets[predictions == targets], minlength=classes)
    return correct, np.bincount(predictions, minlength=classes), np.bincount(targets, minlength=classes)


def class_scores(predictions: IndexArray, targets: IndexArray, labels: tuple[str, ...]) -> tuple[ClassScore, ...]:
    """Each class's precision, recall and F1 = 2·TP / (predicted + actual).

    Source: van Rijsbergen, 1979, with equal weights. A class that is neither predicted nor present scores 0, as in
    scikit-learn's zero_division=0.
    """
    correct, predicted, actual = class_counts(predictions, targets, len(labels))
    return tuple(
        ClassScore(
            label,
            examples=int(actual[c]),
            predicted=int(predicted[c]),
            precision=_ratio(correct[c], predicted[c]),
            recall=_ratio(correct[c], actual[c]),
            f1=_ratio(2 * correct[c], predicted[c] + actual[c]),
        )
        for c, label in enumerate(labels)
    )


def micro_f1(predictions: IndexArray, targets: IndexArray, classes: int) -> float:
    """F1 over the summed counts of all classes; equals accuracy where each example has one class, as the card notes."""
    correct, predicted, actual = class_counts(predictions, targets, classes)
    return _ratio(2 * correct.sum(), predicted.sum() + actual.sum())


def negative_log_likelihood(probabilities: FloatArray, targets: IndexArray) -> float:
    """The mean of -log p(target), in nats."""
    chosen = probabilities[np.arange(len(targets)), targets].astype(np.float64)
    return float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean())


def brier_score(probabilities: FloatArray, targets: IndexArray) -> float:
    """The mean over examples of the summed squared errors of all class probabilities, between 0 and 2.

    Source: Brier, 1950, in its multi-class form; the model card, Evaluation.
    """
    errors = probabilities.astype(np.float64)
    errors[np.arange(len(targets)), targets] -= 1.0
    return float((errors**2).sum(axis=1).mean())


def expected_calibration_error(probabilities: FloatArray, targets: IndexArray, bins: int = CALIBRATION_BINS) -> float:
    """The mean gap between confidence and accuracy over equal-width bins of confidence, weighted by their examples.

    Source: Guo et al., 2017, eq. 3: bins ((m-1)/M, m/M], the confidence being the largest probability.
    """
    found = reliability(probabilities, targets, bins)
    return sum(bin_.examples * abs(bin_.accuracy - bin_.confidence) for bin_ in found) / len(targets)


def reliability(
    probabilities: FloatArray, targets: IndexArray, bins: int = CALIBRATION_BINS
) -> tuple[ReliabilityBin, ...]:
    """What a reliability diagram shows: the bins of confidence that hold an example, lowest first."""
    confidence = probabilities.max(axis=1).astype(np.float64)
    correct = probabilities.argmax(axis=1) == targets
    bin_of = confidence_bins(confidence, bins)
    return tuple(
        ReliabilityBin(
            low=b / bins,
            high=(b + 1) / bins,
            examples=int((bin_of == b).sum()),
            confidence=float(confidence[bin_of == b].mean()),
            accuracy=float(correct[bin_of == b].mean()),
        )
        for b in np.unique(bin_of).tolist()
    )


def confidence_bins(confidence: FloatArray, bins: int = CALIBRATION_BINS) -> IndexArray:
    """`[examples]` number of the bin ((m-1)/M, m/M] that each confidence lies in, from 0."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def confusions(
    predictions: IndexArray, targets: IndexArray, labels: tuple[str, ...], count: int
) -> tuple[Confusion, ...]:
    """The pairs of right label and another one that was answered, most frequent first, at most `count` of them."""
    wrong = predictions != targets
    pairs, times = np.unique(np.stack([targets[wrong], predictions[wrong]]), axis=1, return_counts=True)
    actual = np.bincount(targets, minlength=len(labels))
    return tuple(
        Confusion(labels[pairs[0, i]], labels[pairs[1, i]], int(times[i]), float(times[i] / actual[pairs[0, i]]))
        for i in np.argsort(-times, kind="stable")[:count].tolist()
    )


def pair_negative_log_likelihood(probabilities: FloatArray, holds: NDArray[np.bool_]) -> float:
    """The mean over all pairs of text and label of -log p(what is so), in nats; both arrays of one shape."""
    chosen = np.where(holds, probabilities, 1.0 - probabilities.astype(np.float64))
    return float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean())


def pair_calibration_error(probabilities: FloatArray, holds: NDArray[np.bool_], bins: int = CALIBRATION_BINS) -> float:
    """The mean gap between a label's probability and how often it holds, over equal-width bins of all pairs.

    Bins ((m-1)/M, m/M] of the probability, weighted by their pairs. Source: Guo et al., 2017, eq. 3, for two classes.
    """
    flat = probabilities.astype(np.float64).ravel()
    bin_of = np.clip(np.ceil(flat * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=holds.ravel() - flat, minlength=bins)
    return float(np.abs(gaps).sum() / len(flat))


def softmax_at(logits: FloatArray, temperature: float) -> NDArray[np.float64]:
    """`[examples, classes]` softmax of logits / temperature, in fp64."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    np.exp(scaled, out=scaled)
    scaled /= scaled.sum(axis=1, keepdims=True)
    return scaled


def cosine_similarities(documents: FloatArray, labels: FloatArray) -> FloatArray:
    """`[documents, labels]` cosines of unit vectors `[documents, D]` and `[labels, D]`."""
    return documents @ labels.T


def erasure_ratio(matched_drops: FloatArray, random_drops: FloatArray) -> float:
    """Mean drop of the winning logit without the matched words, over the mean drop without as many random words.

    Above 1 where the matches matter more than chance; infinite where random words cost nothing or even help, while
    the matched ones cost something. Source: the comprehensiveness of DeYoung et al., 2020 (ERASER), against chance.
    """
    matched, random = float(matched_drops.mean()), float(random_drops.mean())
    if random > 0:
        return matched / random
    return float("inf") if matched > 0 else 0.0


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else 0.0
