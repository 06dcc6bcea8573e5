"""Something to measure with, with or without the data folder."""

from pathlib import Path

import pytest

from tests.benchmarks.corpus import load_corpus, made_labels


def test_without_data(tmp_path: Path) -> None:
    """Made texts are as many as Banking77 has, distinct, and of mixed lengths; the source is told."""
    corpus = load_corpus(tmp_path)
    assert corpus.source == "made from words"
    assert len(corpus.texts) == len(set(corpus.texts)) == 3_080
    assert len({len(text.split()) for text in corpus.texts[:64]}) > 8
    assert len(set(corpus.labels)) == 77


def test_labels_are_distinct() -> None:
    """As many as the largest list takes; more is an error and not a shorter list."""
    assert len(set(made_labels(2_048))) == 2_048
    with pytest.raises(ValueError, match="can be made"):
        made_labels(1_000_000)


@pytest.mark.data
def test_with_data(data_root: Path) -> None:
    """The test messages, each once, and all labels as words."""
    corpus = load_corpus(data_root)
    assert len(corpus.texts) == len(set(corpus.texts)) > 3_000
    assert len(corpus.labels) == 77
    assert not any("_" in label for label in corpus.labels)
