"""Figures of several labels a text."""

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score, log_loss, precision_score, recall_score

from tokenalign.training.multi_label_figures import multi_label_figures


def test_figures_are_scikit_learns() -> None:
    """F1, exact match, and each label's precision and recall."""
    rng = np.random.default_rng(0)
    probabilities, holds = rng.random((50, 3)).astype(np.float32), rng.random((50, 3)) < 0.4
    found = multi_label_figures(probabilities, holds, 0.6, ("a", "b", "c"))
    given = probabilities >= 0.6
    assert found.macro_f1 == pytest.approx(f1_score(holds, given, average="macro"))
    assert found.micro_f1 == pytest.approx(f1_score(holds, given, average="micro"))
    assert found.exact_match == pytest.approx(accuracy_score(holds, given))
    assert [c.precision for c in found.per_class] == pytest.approx(precision_score(holds, given, average=None))
    assert [c.recall for c in found.per_class] == pytest.approx(recall_score(holds, given, average=None))
    assert found.pair_nll == pytest.approx(log_loss(holds.ravel(), probabilities.ravel()), abs=1e-6)
    assert found.predicted_positive_rate == pytest.approx(given.mean())
    assert found.positive_rate == pytest.approx(holds.mean())
    assert found.false_per_true == pytest.approx((given & ~holds).sum() / (given & holds).sum())


def test_nothing_right_has_no_ratio() -> None:
    """Where no given label holds there is no true positive to count false ones by."""
    found = multi_label_figures(np.ones((2, 1), dtype=np.float32), np.zeros((2, 1), dtype=bool), 0.5, ("a",))
    assert found.false_per_true is None
    assert (found.macro_f1, found.exact_match, found.predicted_positive_rate, found.positive_rate) == (0, 0, 1, 0)
