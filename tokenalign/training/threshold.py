"""One threshold for all labels, chosen on a calibration split, and how much that choice is worth.

Arrays: probabilities and holds `[texts, labels]`, counts `[resamples, texts]`, how often each text is drawn.
"""

import numpy as np
from numpy.typing import NDArray

from tokenalign.errors import DataError
from tokenalign.evaluation import FloatArray
from tokenalign.linear.config import THRESHOLD_STEP, ThresholdChoice
from tokenalign.training.resampling import Counts, draw_counts

# The Qwen3.5 cards have a grid of 18 points and report multiples of 0.05 between 0.05 and 0.45; they don't list it.
GRID = tuple(round(THRESHOLD_STEP * k, 2) for k in range(1, 19))
RESAMPLES = 100
MIDDLE = (0.05, 0.95)

BoolArray = NDArray[np.bool_]


def choose_threshold(probabilities: FloatArray, holds: BoolArray, *, seed: int = 0) -> ThresholdChoice:
    """The grid's point with the highest macro F1, then micro F1, then the higher point, which gives fewer labels.

    The same choice on bootstrap resamples of the texts says how stable it is. Source of grid and rule: the Qwen3.5
    cards, "Threshold selection". Raises `DataError` where no label holds of any text.
    """
    if not holds.any():
        raise DataError("no label holds of any calibration text, so no threshold can be chosen; give labelled texts")
    texts = len(probabilities)
    chosen = _choices(probabilities, holds, np.ones((1, texts)))[0]
    resampled = _choices(probabilities, holds, draw_counts(texts, resamples=RESAMPLES, seed=seed))
    low, high = np.quantile(resampled, MIDDLE, method="nearest")
    return ThresholdChoice(
        threshold=float(chosen),
        texts=texts,
        resamples=RESAMPLES,
        low=float(low),
        high=float(high),
        lowest=float(resampled.min()),
        highest=float(resampled.max()),
    )


def f1_at(probabilities: FloatArray, holds: BoolArray, threshold: float, counts: Counts) -> tuple[Counts, Counts]:
    """(macro, micro) F1 of each resample, `[resamples]`, where labels are given from `threshold` on.

    F1 is 2·TP / (predicted + actual); 0 for a label that is neither.
    """
    given = probabilities >= np.float32(threshold)
    right = counts @ (given & holds)
    either = counts @ given.astype(np.float64) + counts @ holds.astype(np.float64)
    micro = 2 * right.sum(axis=1) / np.maximum(either.sum(axis=1), 1)
    return (2 * right / np.maximum(either, 1)).mean(axis=1), micro


def _choices(probabilities: FloatArray, holds: BoolArray, counts: Counts) -> NDArray[np.float64]:
    """`[resamples]` thresholds."""
    scores = [f1_at(probabilities, holds, threshold, counts) for threshold in GRID]
    macro = np.round(np.stack([score[0] for score in scores]), 12)  # what differs by rounding is equal
    micro = np.round(np.stack([score[1] for score in scores]), 12)
    order = np.arange(len(GRID))
    best = [np.lexsort((order, micro[:, r], macro[:, r]))[-1] for r in range(counts.shape[0])]
    return np.asarray(GRID)[best]
