"""How good answers of any number of labels are. Arrays: probabilities and holds `[texts, labels]`."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.evaluation import ClassScore, FloatArray, pair_calibration_error, pair_negative_log_likelihood


@dataclass(frozen=True, slots=True)
class MultiLabelFigures:
    """The figures of one head on one set of texts.

    exact_match: share of texts with all of their labels and no other
    predicted_positive_rate, positive_rate: share of all pairs of text and label that are given, and that hold
    false_per_true: false positives for every true one; None where there is no true one
    pair_nll, pair_ece: over all pairs
    """

    texts: int
    labels: int
    threshold: float
    macro_f1: float
    micro_f1: float
    exact_match: float
    predicted_positive_rate: float
    positive_rate: float
    false_per_true: float | None
    pair_nll: float
    pair_ece: float
    per_class: tuple[ClassScore, ...]

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        return asdict(self)


def multi_label_figures(
    probabilities: FloatArray, holds: NDArray[np.bool_], threshold: float, labels: tuple[str, ...]
) -> MultiLabelFigures:
    """All figures where labels are given from `threshold` on; a score whose denominator is zero is 0."""
    given = probabilities >= np.float32(threshold)
    right, predicted, actual = (given & holds).sum(axis=0), given.sum(axis=0), holds.sum(axis=0)
    f1 = 2 * right / np.maximum(predicted + actual, 1)
    true = int(right.sum())
    return MultiLabelFigures(
        texts=len(holds),
        labels=len(labels),
        threshold=threshold,
        macro_f1=float(f1.mean()),
        micro_f1=float(2 * true / max(1, predicted.sum() + actual.sum())),
        exact_match=float((given == holds).all(axis=1).mean()),
        predicted_positive_rate=float(given.mean()),
        positive_rate=float(holds.mean()),
        false_per_true=float((predicted.sum() - true) / true) if true else None,
        pair_nll=pair_negative_log_likelihood(probabilities, holds),
        pair_ece=pair_calibration_error(probabilities, holds),
        per_class=tuple(
            ClassScore(
                name,
                examples=int(actual[c]),
                predicted=int(predicted[c]),
                precision=float(right[c] / predicted[c]) if predicted[c] else 0.0,
                recall=float(right[c] / actual[c]) if actual[c] else 0.0,
                f1=float(f1[c]),
            )
            for c, name in enumerate(labels)
        ),
    )
