"""Splits of texts with any number of labels."""

from dataclasses import replace

import numpy as np
import pytest

from tokenalign.errors import DataError
from tokenalign.training.labelled_data import LabelledData, LabelledText, label_matrix
from tokenalign.training.stratified import describe_stratified, make_stratified_split, stratify

NAMES = ("a", "b", "rare")


def data(texts: int = 200, test: tuple[LabelledText, ...] | None = None) -> LabelledData:
    """Texts with none, one or two labels, of which one is rare."""
    rng = np.random.default_rng(3)
    held = rng.random((texts, 3)) < [0.4, 0.3, 0.1]
    rows = tuple(
        LabelledText(f"text number {i}", tuple(name for name, has in zip(NAMES, row, strict=True) if has))
        for i, row in enumerate(held)
    )
    return LabelledData("multi_label", NAMES, rows, test, {})


def test_every_label_has_its_share_in_every_partition() -> None:
    """Within two texts of it, the rare one too, and so have the texts without a label."""
    whole = data()
    split = make_stratified_split(whole, 1)
    holds = label_matrix(whole.texts, NAMES)
    for name, share in {"train": 0.6, "validation": 0.1, "calibration": 0.15, "test": 0.15}.items():
        part = label_matrix(split.partitions[name], NAMES)
        assert len(part) == pytest.approx(200 * share, abs=5)
        assert part.sum(axis=0).tolist() == pytest.approx((holds.sum(axis=0) * share).tolist(), abs=2)
        assert (~part.any(axis=1)).sum() == pytest.approx((~holds.any(axis=1)).sum() * share, abs=2)
    assert sorted(text.text for part in split.partitions.values() for text in part) == sorted(
        text.text for text in whole.texts
    )


def test_one_label_a_text_is_plain_stratification() -> None:
    """Each label's texts are divided as exactly as whole texts can be."""
    holds = np.eye(3, dtype=bool)[np.repeat([0, 1, 2], [100, 40, 20])]
    of_text = stratify(holds, [0.6, 0.4], np.random.default_rng(0))
    assert [(of_text[holds[:, c]] == 0).sum() for c in range(3)] == [60, 24, 12]


def test_a_seed_gives_its_split_again() -> None:
    """Another one gives another."""
    first, again, other = (make_stratified_split(data(), seed).partitions for seed in (1, 1, 2))
    assert first == again != other


def test_a_text_stands_once_and_in_the_test_file_first() -> None:
    """Duplicates by case and white space are left out and counted, also those with other labels."""
    test = (LabelledText("TEXT  number 0", ("a",)), LabelledText("only here", ("b",)))
    whole = data(test=test)
    doubled = replace(whole, texts=(*whole.texts, LabelledText("text number 7", ("rare", "a", "b"))))
    split = make_stratified_split(doubled, 1)
    texts = [text.text.lower() for part in split.partitions.values() for text in part]
    assert split.partitions["test"] == test
    assert texts.count("text number 0") == 0
    assert texts.count("text number 7") == 1
    assert (split.removed["data"].exact, split.removed["data"].normalised) == (1, 1)
    assert split.removed["data"].other_label >= 1
    assert set(describe_stratified(split)["leakage"]["shared_with_training"].values()) == {0}


def test_too_little_is_refused() -> None:
    """An empty partition, and a label that would not be trained."""
    with pytest.raises(DataError, match="leave none for"):
        make_stratified_split(data(2), 1)
    whole = data()
    test = (LabelledText("the only text of it", ("b",)),)
    absent = replace(whole, labels=(*NAMES, "never"), test=test)
    with pytest.raises(DataError, match="'never' has no text left to train on"):
        make_stratified_split(absent, 1)
