"""Near-duplicates of a label set: which are found, which are not, and what is said of them."""

import numpy as np
import pytest

from deploy import label_lint
from deploy.label_cache.codec import LabelRows
from deploy.label_lint import near_duplicates, normalised, similarity
from tokenalign import LabelSet

AXES = np.eye(8, dtype=np.float32)


def rows_of(*labels: list[int] | np.ndarray) -> LabelRows:
    """Rows of descriptions: each token an axis, or rows as they are."""
    parts = [AXES[label] if isinstance(label, list) else label for label in labels]
    return LabelRows(np.concatenate(parts), np.array([len(part) for part in parts], dtype=np.int32))


def turned(cosine: float) -> np.ndarray:
    """One unit row with that cosine to the first axis."""
    row = np.zeros((1, 8), dtype=np.float32)
    row[0, :2] = cosine, (1 - cosine**2) ** 0.5
    return row


class TestSimilarity:
    def test_order_of_tokens_does_not_count(self) -> None:
        """Each token looks for its best match, wherever that stands."""
        assert similarity(AXES[[0, 1, 2]], AXES[[2, 0, 1]]) == 1.0

    def test_the_smaller_direction_counts(self) -> None:
        """A label that holds all of another and more is not alike: the added tokens have no equal."""
        assert similarity(AXES[[0, 1]], AXES[[0, 1, 2, 3]]) == similarity(AXES[[0, 1, 2, 3]], AXES[[0, 1]]) == 0.5

    def test_negative_cosines(self) -> None:
        """Opposite rows are at the lower end, not at 0."""
        assert similarity(AXES[:1], -AXES[:1]) == -1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [("Top-up failed", "top up  FAILED!"), ("ﬁne", "fine"), ("C#", "c"), ("straße", "STRASSE"), ("a\u3000b", "ab")],
)
def test_texts_that_differ_in_form_alone(one: str, other: str) -> None:
    """Case, white space, punctuation and compatibility forms don't make another label."""
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(("one", "other"), [("C++", "C"), ("€5", "$5"), ("???", "!!!"), ("naïve", "naive")])
def test_texts_that_differ(one: str, other: str) -> None:
    """Symbols are words, accents count, and of punctuation alone nothing is taken away."""
    assert normalised(one) != normalised(other)


class TestNearDuplicates:
    def test_by_representation(self) -> None:
        """At the threshold a pair is near, below it is not; the later label is named, with the earlier's number."""
        labels = LabelSet.of(["first", "second", "third"])
        rows = rows_of(turned(1.0), AXES[[5]], turned(0.95))
        [warning] = near_duplicates(labels, rows, 0.94)
        assert (warning["loc"], warning["type"]) == (["labels", 2], "near_duplicate")
        assert "'third' is hardly told apart from 'first' of label number 0" in warning["message"]
        assert "similarity 0.95 of at most 1" in warning["message"]
        assert near_duplicates(labels, rows, 0.96) == []

    def test_by_text(self) -> None:
        """Labels with the same words are near, however differently the model reads them."""
        [warning] = near_duplicates(LabelSet.of(["Top-up", "other", "top up"]), rows_of([0], [1], [2]), 0.9)
        assert warning["loc"] == ["labels", 2]
        assert "case, white space or punctuation alone" in warning["message"]

    def test_descriptions_of_one_label_may_be_alike(self) -> None:
        """Two wordings of the same label compete with nobody."""
        labels = LabelSet.of([{"name": "a", "description": ["Top-up", "top up"]}, "b"])
        assert near_duplicates(labels, rows_of([0], [0], [1]), 0.9) == []

    def test_any_description_counts(self) -> None:
        """A label is a near-duplicate as soon as one of its descriptions is; positions are those of labels."""
        labels = LabelSet.of([{"name": "a", "description": ["x", "y"]}, {"name": "b", "description": ["z", "w"]}])
        [warning] = near_duplicates(labels, rows_of([0], [1], [2], [1]), 0.9)
        assert warning["loc"] == ["labels", 1]
        assert "'w' is hardly told apart from 'y' of label number 0" in warning["message"]

    def test_one_warning_a_label_about_the_nearest(self) -> None:
        """A hundred equal labels give 99 warnings and not 4,950; the nearest of several is the one named."""
        many = LabelSet.of([f"label {i}" for i in range(100)])
        assert [w["loc"][1] for w in near_duplicates(many, rows_of(*[[0]] * 100), 0.9)] == list(range(1, 100))
        labels = LabelSet.of(["first", "second", "third"])
        found = near_duplicates(labels, rows_of(turned(0.92), turned(0.99), turned(1.0)), 0.9)
        assert "'third' is hardly told apart from 'second'" in found[-1]["message"]

    def test_what_was_told_already(self) -> None:
        """A label that is known to read the same as another is not reported twice."""
        assert near_duplicates(LabelSet.of(["a", "b"]), rows_of([0], [0]), 0.9, known={1}) == []

    def test_pairs_across_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Descriptions are compared in blocks, and a pair in two blocks is found like one in the same."""
        monkeypatch.setattr(label_lint, "_BLOCK", 2)
        labels = LabelSet.of([f"label {i}" for i in range(7)])
        rows = rows_of([0], [1], [2], [3], [4], [1], [0])
        assert [w["loc"][1] for w in near_duplicates(labels, rows, 0.9)] == [5, 6]

    def test_too_many_to_compare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Past the bound only texts are compared, and the answer says so."""
        monkeypatch.setattr(label_lint, "MAX_COMPARED", 2)
        labels = LabelSet.of(["a", "b", "A!"])
        same, told = near_duplicates(labels, rows_of([0], [0], [1]), 0.9)
        assert same["loc"] == ["labels", 2]
        assert (told["loc"], told["type"]) == (["labels"], "not_compared")
        assert "3 descriptions are too many" in told["message"]

    def test_long_labels_are_shortened(self) -> None:
        """A warning repeats the beginning of a description, not all of it."""
        labels = LabelSet.of(["x" * 10_000, "X" * 10_000])
        [warning] = near_duplicates(labels, rows_of([0], [1]), 0.9)
        assert len(warning["message"]) < 500

    def test_half_precision(self) -> None:
        """Rows come in float16 too, whose sums over long labels would overflow or be coarse."""
        rows = rows_of(*[[0] * 3_000, [1] * 3_000, [0] * 3_000])
        halves = LabelRows(rows.values.astype(np.float16), rows.lengths)
        assert [w["loc"][1] for w in near_duplicates(LabelSet.of(["a", "b", "c"]), halves, 0.9)] == [2]
