"""One threshold for all labels."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from tokenalign.errors import DataError
from tokenalign.training.threshold import GRID, choose_threshold, f1_at


def random_case(texts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels of four labels that go together, one of them rare."""
    rng = np.random.default_rng(seed)
    holds = rng.random((texts, 4)) < [0.5, 0.3, 0.2, 0.1]
    z = 1.5 * holds - 1 + rng.normal(size=holds.shape)
    return (1 / (1 + np.exp(-z))).astype(np.float32), holds


def test_the_grid_is_the_cards() -> None:
    """Eighteen points, every threshold that the cards report among them."""
    assert len(GRID) == 18
    assert {0.05, 0.1, 0.15, 0.2, 0.3, 0.45} <= set(GRID)


def test_f1_is_scikit_learns() -> None:
    """Macro and micro, for the texts as they are and for a resample that draws some twice."""
    probabilities, holds = random_case(40)
    drawn = np.arange(40) // 2
    counts = np.stack([np.ones(40), np.bincount(drawn, minlength=40)])
    macro, micro = f1_at(probabilities, holds, 0.35, counts)
    for row, texts in enumerate([np.arange(40), drawn]):
        given = probabilities[texts] >= 0.35
        assert macro[row] == pytest.approx(f1_score(holds[texts], given, average="macro", zero_division=0))
        assert micro[row] == pytest.approx(f1_score(holds[texts], given, average="micro", zero_division=0))


def test_the_best_point_of_the_grid_is_chosen() -> None:
    """The one with the highest macro F1, found by trying all."""
    probabilities, holds = random_case(200)
    scores = [f1_score(holds, probabilities >= np.float32(t), average="macro", zero_division=0) for t in GRID]
    assert choose_threshold(probabilities, holds).threshold == GRID[int(np.argmax(scores))]


def test_equal_points_give_fewer_labels() -> None:
    """Where every point between two probabilities is as good, the highest of them is taken."""
    holds = np.array([[True], [False]])
    assert choose_threshold(np.array([[0.62], [0.2]], dtype=np.float32), holds).threshold == 0.6


def test_micro_f1_decides_between_equal_macro_f1() -> None:
    """Up to 0.35 the frequent label's F1 is 1 and the rare one's 1/2, above it is the other way round."""
    frequent = [0.95, 0.37, 0.37, 0.01, 0.01, 0.01]
    rare = [0.95, 0.01, 0.01, 0.37, 0.37, 0.01]
    holds = np.array([[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=bool).T
    probabilities = np.array([frequent, rare], dtype=np.float32).T
    assert [f1_at(probabilities, holds, t, np.ones((1, 6)))[0].item() for t in (0.35, 0.9)] == [0.75, 0.75]
    assert choose_threshold(probabilities, holds).threshold == 0.35


def test_few_texts_make_an_unstable_choice_and_many_a_stable_one() -> None:
    """What the cards saw from seed to seed shows in the resamples of one split."""
    few, many = choose_threshold(*random_case(20)), choose_threshold(*random_case(20_000))
    assert few.warning is not None
    assert few.high - few.low > 0.1
    assert few.lowest <= few.low <= few.high <= few.highest
    assert many.warning is None
    assert (many.texts, many.resamples) == (20_000, 100)


def test_the_same_numbers_give_the_same_choice() -> None:
    """The resamples are drawn by a fixed seed."""
    assert choose_threshold(*random_case(50)) == choose_threshold(*random_case(50))


def test_labels_are_needed() -> None:
    """Without a positive pair every threshold is as bad."""
    with pytest.raises(DataError, match="no label holds"):
        choose_threshold(np.full((3, 2), 0.5, dtype=np.float32), np.zeros((3, 2), dtype=bool))
