"""Detection of messages that no label fits."""

import numpy as np
import pytest

from tokenalign.training.out_of_scope import answered_share, detection, detections, scope_scores


def test_scores_by_hand() -> None:
    """Largest logit, its lead, the largest probability and the negated entropy of two equal and one lower logit."""
    found = scope_scores(np.log(np.array([[0.4, 0.4, 0.2]])) + 3)
    assert found["logit"] == pytest.approx(np.log(0.4) + 3)
    assert found["margin"] == pytest.approx(0)
    assert found["probability"] == pytest.approx(0.4)
    assert found["entropy"] == pytest.approx(0.8 * np.log(0.4) + 0.2 * np.log(0.2))


def test_detection_by_hand() -> None:
    """Of 20 x 4 pairs one is the wrong way round; 95 % of 20 are 19, at whose score one of four is answered too."""
    inside = np.array([0.1, *np.linspace(1, 2, 19)])
    outside = np.array([0.0, 0.05, 0.2, 0.01])
    assert detection(inside, outside).auroc == pytest.approx(1 - 1 / 80)
    assert detection(inside, outside).fpr_at_95_recall == 0
    crossed = detection(inside, np.array([0.0, 0.05, 1.0, 0.01]))
    assert crossed.fpr_at_95_recall == pytest.approx(1 / 4)


def test_every_score_detects_what_is_plain() -> None:
    """Messages with one clear label stand out from those with none, by each score; by chance they don't."""
    rng = np.random.default_rng(0)
    outside = rng.normal(size=(300, 6))
    inside = rng.normal(size=(300, 6))
    inside[np.arange(300), rng.integers(6, size=300)] += 8
    for name, found in detections(inside, outside).items():
        assert found.auroc > 0.99, name
    for name, found in detections(rng.normal(size=(300, 6)), outside).items():
        assert found.auroc == pytest.approx(0.5, abs=0.07), name
        assert found.fpr_at_95_recall > 0.85, name


def test_answered_share() -> None:
    """A score just at the limit is answered."""
    logits = np.log(np.array([[0.5, 0.5], [0.8, 0.2], [0.9, 0.1]]))
    assert answered_share(logits, 0.85) == pytest.approx(1 / 3)
    assert answered_share(logits, 0.5) == 1
