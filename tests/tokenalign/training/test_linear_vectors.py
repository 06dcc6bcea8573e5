"""Vectors of a file's texts, whatever the split."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tokenalign.errors import InputError, NumericalError
from tokenalign.linear.pooling import pooled_states
from tokenalign.linear.reading import Reading
from tokenalign.text import TextTokenizer
from tokenalign.training.encoder import Encoder
from tokenalign.training.features import cached_vectors
from tokenalign.training.labelled_data import LabelledText
from tokenalign.training.linear_vectors import TextVectors, text_vectors

TEXTS = (LabelledText("card", ("a",)), LabelledText("cash " * 20, ("a", "b")), LabelledText("card", ()))
READING = Reading("mean", window=12, stride=5)


def counting(encoder: Encoder) -> Any:
    return Mock(wraps=encoder.backbone, identity=encoder.backbone.identity, width=encoder.backbone.width)


@pytest.fixture
def tokenizer(encoder: Encoder) -> TextTokenizer:
    """The tiny BERT's, with windows of twelve tokens."""
    return TextTokenizer.load(encoder.folder, encoder.config.model_copy(update={"max_length": 12}))


def test_partitions_are_drawn_from_the_same_vectors(encoder: Encoder, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """In any order, windows and labels with their texts, and another split encodes nothing."""
    backbone = counting(encoder)

    def read() -> TextVectors:
        return text_vectors(backbone, tokenizer, READING, TEXTS, tmp_path, "data")

    found = read().pooled([TEXTS[1], TEXTS[0]], ("a", "b"))
    windows = READING.windows(tokenizer, [TEXTS[1].text, TEXTS[0].text])
    assert found.counts.tolist() == windows.counts.tolist() == [3, 1]
    expected = pooled_states(encoder.backbone, windows.tokenized.tokens, "mean").numpy()
    np.testing.assert_allclose(found.vectors, expected, atol=1e-5)
    assert found.holds.tolist() == [[True, True], [True, False]]
    calls = backbone.encode.call_count
    assert read().pooled([TEXTS[2]], ("a", "b")).vectors.shape == (1, 32)
    assert backbone.encode.call_count == calls == 1


def test_a_text_that_cannot_be_read_is_named(encoder: Encoder, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """By the file's name and its number."""
    texts = (*TEXTS, LabelledText("cash " * 2_000, ()))
    with pytest.raises(InputError, match="at most 64 allowed") as caught:
        text_vectors(encoder.backbone, tokenizer, READING, texts, tmp_path, "data")
    assert caught.value.loc == ("data", 2)


def test_other_pooling_has_another_file(encoder: Encoder, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """The same tokens pooled otherwise are other vectors, and so are the states themselves."""
    tokens = tokenizer.documents(["card", "cash"]).tokens
    last, mean = (cached_vectors(encoder.backbone, tokens, pooling, tmp_path) for pooling in ("last", "mean"))
    assert np.abs(last - mean).max() > 1e-3
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_vectors_that_are_no_numbers_are_refused(encoder: Encoder, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """And never kept."""
    tokens = tokenizer.documents(["card"]).tokens
    backbone = counting(encoder)
    backbone.encode = Mock(return_value=torch.full((len(tokens.values), 32), float("nan")))
    with pytest.raises(NumericalError, match="NaN or infinity"):
        cached_vectors(backbone, tokens, "mean", tmp_path)
    assert list(tmp_path.glob("*.npy")) == []
