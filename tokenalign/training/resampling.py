"""How sure figures are: bootstrap intervals, and whether two models on the same messages differ by more than chance.

A resample is a vector of counts, how often each example was drawn; every figure but the F1 is then linear in it, and F1
is a ratio of linear ones, so that a thousand resamples are a few matrix products.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.evaluation import CALIBRATION_BINS, FloatArray, IndexArray, confidence_bins

RESAMPLES = 1_000
COVERAGE = 0.95
FIGURES = ("accuracy", "macro_f1", "nll", "brier", "ece")

Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model against another on the same examples, each figure as the first's minus the second's.

    examples: how many there are
    differences, intervals: by figure; intervals are those of the paired bootstrap
    only_first, only_second: examples that one alone has right; p_value: of McNemar's exact test, that such a
        difference in accuracy or a larger one comes about where both are equally good
    """

    examples: int
    differences: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    only_first: int
    only_second: int
    p_value: float

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        return asdict(self)


def draw_counts(examples: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Counts:
    """`[resamples, examples]` how often each example is drawn, as many draws as there are examples."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(examples, np.full(examples, 1 / examples), size=resamples).astype(np.float64)


def resampled_figures(probabilities: FloatArray, targets: IndexArray, counts: Counts) -> dict[str, NDArray[np.float64]]:
    """Figure -> `[resamples]` its values; probabilities: `[examples, classes]`, counts as by `draw_counts`.

    A class that a resample has neither as target nor as prediction counts as F1 0, as in `evaluation.class_scores`.
    """
    exact = probabilities.astype(np.float64)
    rows, classes = np.arange(len(targets)), exact.shape[1]
    predictions, confidence = exact.argmax(axis=1), exact.max(axis=1)
    correct = (predictions == targets).astype(np.float64)
    chosen = exact[rows, targets]
    errors = (exact**2).sum(axis=1) - 2 * chosen + 1
    one_hot = np.eye(classes)
    actual, predicted = counts @ one_hot[targets], counts @ one_hot[predictions]
    right = counts @ (one_hot[targets] * correct[:, None])
    gaps = np.zeros((len(targets), CALIBRATION_BINS))
    gaps[rows, confidence_bins(confidence)] = correct - confidence
    drawn = counts.sum(axis=1)
    return {
        "accuracy": counts @ correct / drawn,
        "macro_f1": (2 * right / np.maximum(actual + predicted, 1)).mean(axis=1),
        "nll": counts @ -np.log(np.maximum(chosen, np.finfo(np.float64).tiny)) / drawn,
        "brier": counts @ errors / drawn,
        "ece": np.abs(counts @ gaps).sum(axis=1) / drawn,
    }


def intervals(values: Mapping[str, NDArray[np.float64]], coverage: float = COVERAGE) -> dict[str, tuple[float, float]]:
    """Figure -> the percentile interval of its resampled values. Source: Efron and Tibshirani, 1993, section 13.3."""
    tails = [(1 - coverage) / 2, (1 + coverage) / 2]
    found = {name: np.quantile(of_name, tails) for name, of_name in values.items()}
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def bootstrap_intervals(
    probabilities: FloatArray, targets: IndexArray, counts: Counts
) -> dict[str, tuple[float, float]]:
    """Figure -> its 95 % interval over the resamples."""
    return intervals(resampled_figures(probabilities, targets, counts))


def compare(first: FloatArray, second: FloatArray, targets: IndexArray, counts: Counts) -> Comparison:
    """The comparison of two models' probabilities `[examples, classes]` on the same examples.

    Source of the test: McNemar, 1947, with exact binomial probabilities; needs scipy (the extra `train`).
    """
    from scipy.stats import binomtest

    everything = np.ones((1, len(targets)))
    whole = [resampled_figures(model, targets, everything) for model in (first, second)]
    drawn = [resampled_figures(model, targets, counts) for model in (first, second)]
    right = [model.argmax(axis=1) == targets for model in (first, second)]
    only_first, only_second = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    either = only_first + only_second
    return Comparison(
        examples=len(targets),
        differences={name: float(whole[0][name][0] - whole[1][name][0]) for name in FIGURES},
        intervals=intervals({name: drawn[0][name] - drawn[1][name] for name in FIGURES}),
        only_first=only_first,
        only_second=only_second,
        p_value=float(binomtest(only_first, either).pvalue) if either else 1.0,
    )
