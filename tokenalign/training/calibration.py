"""What makes probabilities honest, fitted after training on messages that selected nothing.

The temperature of the softmax over the candidates, the scaling of each logit by itself for `multi_label`, and the score
below which no label should be named.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.config import AbstentionCalibration, MultiLabelCalibration
from tokenalign.evaluation import (
    FloatArray,
    IndexArray,
    pair_calibration_error,
    pair_negative_log_likelihood,
)
from tokenalign.results import independent_scores, softmax

LOWEST, HIGHEST = 0.01, 100.0
NEWTON_STEPS = 100
KEPT_SHARE = 0.95
FEW_MESSAGES, FEW_MISTAKES = 50, 5  # below them what is fitted rests more on its assumptions than on data
_GOLDEN = (math.sqrt(5) - 1) / 2


def fit_temperature(logits: FloatArray, targets: IndexArray) -> float:
    """The temperature between 0.01 and 100 that minimises the NLL of softmax(logits / temperature), targets smoothed.

    logits: `[examples, classes]`. Source: Guo et al., 2017, section 4.2. Where no example is answered wrong, the plain
    NLL falls for ever as the temperature does, and says that no example ever will be. So targets are smoothed as by
    Platt, 1999, section 2.2: of n examples each counts with 1 / (n + 2) as one whose best other class is right, the
    rule of succession. Then probabilities reach (n + 1) / (n + 2) at most on average, and with many mistakes among
    many examples hardly anything changes. The loss is convex in 1 / temperature, so golden-section search over its
    logarithm finds the minimum; the same numbers always give the same temperature.
    """
    exact, rows = logits.astype(np.float64), np.arange(len(targets))
    doubt = 1 / (len(targets) + 2)
    # The loss is linear in the log probabilities, so an example's smoothed target is a mean of its two logits.
    wanted = (1 - doubt) * exact[rows, targets] + doubt * exact[rows, _best_others(exact, targets)]

    def nll(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        return float((np.logaddexp.reduce(exact / temperature, axis=1) - wanted / temperature).mean())

    low, high = math.log(LOWEST), math.log(HIGHEST)
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = nll(left), nll(right)
    while high - low > 1e-7:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = nll(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = nll(right)
    return math.exp((low + high) / 2)


def fit_multi_label(logits: FloatArray, targets: IndexArray) -> MultiLabelCalibration | None:
    """The scaling that minimises the NLL of sigmoid(scale · logit + bias) over all pairs of example and class.

    logits: `[examples, classes]`, divided by the temperature. Each example's target holds and its other classes don't,
    so with C classes one pair in C holds, which the bias takes in. None where the logits don't rise with being right.
    Targets are smoothed as by Platt, 1999, section 2.2, so that a minimum exists when no pair is wrong; found by
    Newton's method with halved steps, as by Lin, Lin and Weng, 2007. Source of one scaling for each class against the
    rest: Zadrozny and Elkan, 2002; shared by all classes here, since labels come with the request.
    """
    x = logits.astype(np.float64).ravel()
    holds = _holds(logits, targets).ravel()
    positives, negatives = int(holds.sum()), int((~holds).sum())
    wanted = np.where(holds, (positives + 1) / (positives + 2), 1 / (negatives + 2))

    def loss(parameters: NDArray[np.float64]) -> float:
        z = parameters[0] * x + parameters[1]
        return float((np.logaddexp(0, z) - wanted * z).sum())

    design = np.stack([x, np.ones_like(x)], axis=1)
    found = np.array([0.0, math.log((positives + 1) / (negatives + 1))])
    for _ in range(NEWTON_STEPS):
        p = _sigmoid(design @ found)
        gradient = design.T @ (p - wanted)
        if np.abs(gradient).max() < 1e-9 * len(x):
            break
        curvature = (design * (p * (1 - p))[:, None]).T @ design + 1e-12 * np.eye(2)
        step, size, before = np.linalg.solve(curvature, gradient), 1.0, loss(found)
        while size > 1e-10 and loss(found - size * step) > before - 1e-4 * size * float(gradient @ step):
            size /= 2
        if size <= 1e-10:
            break  # nothing lower can be told apart in fp64
        found = found - size * step
    scale, bias = float(found[0]), float(found[1])
    return MultiLabelCalibration(scale=scale, bias=bias) if scale > 0 else None


def multi_label_figures(logits: FloatArray, targets: IndexArray, calibration: MultiLabelCalibration) -> dict[str, Any]:
    """NLL and ECE over all pairs of example and class; logits as for `fit_multi_label`."""
    probabilities, holds = independent_scores(logits, calibration), _holds(logits, targets)
    return {
        "examples": len(targets),
        "classes": logits.shape[1],
        "pair_nll": pair_negative_log_likelihood(probabilities, holds),
        "pair_ece": pair_calibration_error(probabilities, holds),
    }


def fit_abstention(
    logits: FloatArray, multi_label: MultiLabelCalibration | None, kept: float = KEPT_SHARE
) -> AbstentionCalibration:
    """The highest limits of the best score that at least `kept` of these examples reach.

    logits: `[examples, classes]`, divided by the temperature, of examples that have one of the classes each. Whether
    the best label is the right one plays no part: the limit says what a text that has a label here looks like.
    """

    def limit(scores: FloatArray) -> float:
        return float(np.quantile(scores.max(axis=1), 1 - kept, method="lower"))

    return AbstentionCalibration(
        kept=kept,
        labels=logits.shape[1],
        min_score=limit(softmax(logits)),
        multi_label_min_score=None if multi_label is None else limit(independent_scores(logits, multi_label)),
    )


def scarcity(training: Mapping[str, Any]) -> str | None:
    """What to tell of calibrations fitted on few messages, or with few mistakes among them; None where enough of both.

    training: what a head keeps of its training, as in its provenance; one of another make tells nothing
    """
    if (fitted_on := training.get("validation_calibrate")) is None:
        return None
    examples = fitted_on["examples"]
    mistakes = round((1 - fitted_on["accuracy"]) * examples)
    if examples < FEW_MESSAGES:
        return (
            f"temperature, independent scores and min_score were fitted on {examples} messages, which is few: take "
            "scores and limit for rough, or validate on more messages"
        )
    if mistakes < FEW_MISTAKES:
        return (
            f"of the {examples:,} messages that temperature, independent scores and min_score were fitted on, "
            f"{mistakes} {'is' if mistakes == 1 else 'are'} answered wrong, so how sure the head may be rests on the "
            "assumption of one mistake more: scores and min_score are high, and texts less plain than these messages "
            "fall below it"
        )
    return None


def _best_others(logits: FloatArray, targets: IndexArray) -> IndexArray:
    """`[examples]` the class of the largest logit but the target's."""
    without = logits.copy()
    without[np.arange(len(targets)), targets] = -np.inf
    found: IndexArray = without.argmax(axis=1)
    return found


def _holds(logits: FloatArray, targets: IndexArray) -> NDArray[np.bool_]:
    holds: NDArray[np.bool_] = np.arange(logits.shape[1]) == np.asarray(targets)[:, None]
    return holds


def _sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = np.exp(-np.logaddexp(0, -z))
    return probabilities
