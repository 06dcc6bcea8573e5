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

LOWEST, HIGHEST = 0.001, 100.0
NEWTON_STEPS = 100
KEPT_SHARE = 0.95
PRIOR_SD = math.log(2)
FEWEST_TO_ABSTAIN = math.ceil(1 / (1 - KEPT_SHARE) - 1e-9) - 1
FEW_MESSAGES, FEW_MISTAKES = 50, 5  # below them what is fitted rests more on its assumptions than on data
_GOLDEN = (math.sqrt(5) - 1) / 2


def fit_temperature(logits: FloatArray, targets: IndexArray, usual: float = 1.0) -> float:
    """The likeliest temperature between 0.001 and 100 of softmax(logits / temperature).

    logits: `[examples, classes]`; usual: what it is taken for until examples say otherwise: 1, which heads are trained
    at. Source: Guo et al., 2017, section 4.2, but for a prior: its logarithm is normal around the usual one's, with a
    factor of two as standard deviation. The NLL alone falls for ever as the temperature does where no example is
    answered wrong, and so would make a head that has had ten easy messages as sure as numbers go. Ten such messages
    leave the usual temperature as it is, hundreds sharpen it, and with mistakes among them hundreds outweigh the prior.
    The same numbers always give the same temperature.
    """
    exact = logits.astype(np.float64)
    chosen = exact[np.arange(len(targets)), targets]

    def loss(log_temperature: float) -> float:
        temperature = math.exp(log_temperature)
        nll = (np.logaddexp.reduce(exact / temperature, axis=1) - chosen / temperature).sum()
        return float(nll) + 0.5 * ((log_temperature - math.log(usual)) / PRIOR_SD) ** 2

    grid = np.linspace(math.log(LOWEST), math.log(HIGHEST), 101)
    lowest = int(np.argmin([loss(point) for point in grid]))
    low, high = float(grid[max(0, lowest - 1)]), float(grid[min(len(grid) - 1, lowest + 1)])
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 1e-7:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(right)
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
) -> AbstentionCalibration | None:
    """The highest limits of the best score that a new example of this kind reaches with probability `kept`.

    logits: `[examples, classes]`, divided by the temperature, of examples that have one of the classes each. Whether
    the best label is the right one plays no part: the limit says what a text that has a label here looks like. Of n
    examples it is the floor((n + 1) · (1 - kept))-th lowest score, whatever the scores' distribution; source: split
    conformal prediction, Vovk et al., 2005. None where that is none, so with fewer than 19 for 95 %. And no limit lies
    nearer to 1 than 1 / (n + 2): by the rule of succession n examples tell nothing of rarer failures.
    """
    examples = len(logits)
    rank = math.floor((examples + 1) * (1 - kept) + 1e-9)
    if rank < 1:
        return None

    def limit(scores: FloatArray) -> float:
        return min(float(np.sort(scores.max(axis=1))[rank - 1]), (examples + 1) / (examples + 2))

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
    what = "temperature, independent scores and min_score were"
    if examples < FEWEST_TO_ABSTAIN:
        return (
            f"the calibrations rest on {examples} messages, which is few: scores are rough, and there is no calibrated "
            f"min_score, which takes {FEWEST_TO_ABSTAIN}; give more messages to validate on"
        )
    if examples < FEW_MESSAGES:
        return f"{what} fitted on {examples} messages, which is few: take scores and limit for rough"
    if mistakes < FEW_MISTAKES:
        return (
            f"{what} fitted on {examples:,} messages of which {mistakes} {'is' if mistakes == 1 else 'are'} answered "
            "wrong, which tells little of when the head errs: scores are high, and texts less plain than these "
            "messages fall below min_score"
        )
    return None


def _holds(logits: FloatArray, targets: IndexArray) -> NDArray[np.bool_]:
    holds: NDArray[np.bool_] = np.arange(logits.shape[1]) == np.asarray(targets)[:, None]
    return holds


def _sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    probabilities: NDArray[np.float64] = np.exp(-np.logaddexp(0, -z))
    return probabilities
