"""The temperature."""

import numpy as np
import pytest

from tokenalign.evaluation import negative_log_likelihood, softmax_at
from tokenalign.training.calibration import HIGHEST, LOWEST, fit_temperature


@pytest.mark.parametrize("truth", [0.3, 1.0, 7.0])
def test_the_true_temperature_is_found(truth: float) -> None:
    """Labels drawn from softmax(logits / T) give back T."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20_000, 5)) * 3
    probabilities = softmax_at(logits, truth)
    targets = (probabilities.cumsum(axis=1) < rng.random((len(logits), 1))).sum(axis=1)
    assert fit_temperature(logits, targets) == pytest.approx(truth, rel=0.05)


def test_no_grid_point_is_better() -> None:
    """The NLL at the temperature found is the lowest of a fine grid."""
    rng = np.random.default_rng(1)
    logits, targets = rng.normal(size=(200, 4)) * 5, rng.integers(4, size=200)
    found = negative_log_likelihood(softmax_at(logits, fit_temperature(logits, targets)), targets)
    grid = [negative_log_likelihood(softmax_at(logits, t), targets) for t in np.geomspace(LOWEST, HIGHEST, 400)]
    assert found <= min(grid) + 1e-9


def test_temperatures_stay_in_their_bounds() -> None:
    """Logits that are always right or always wrong end at the bounds, not at zero or infinity."""
    logits = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert fit_temperature(logits, np.array([0, 1])) < 0.1
    assert fit_temperature(logits, np.array([1, 0])) == pytest.approx(HIGHEST, rel=1e-3)
