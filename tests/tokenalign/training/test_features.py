"""Token states on disk: equal to the encoder's, keyed by what they depend on, resumable."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tokenalign.backbone import Backbone
from tokenalign.errors import NumericalError
from tokenalign.tokens import TokenBatch
from tokenalign.training import features
from tokenalign.training.encoder import Encoder
from tokenalign.training.features import Features, as_tensor, cached_states, mean_pooled

TEXTS = ["my card", "cash was declined twice", "fee", "why was i charged", "pin"]


@pytest.fixture
def ids(encoder: Encoder) -> TokenBatch:
    """Five texts as ids."""
    return encoder.tokenizer().documents(TEXTS).tokens


def counting(backbone: Backbone) -> Mock:
    """A backbone that counts its forward calls."""
    return Mock(wraps=backbone, identity=backbone.identity, width=backbone.width)


def test_states_are_the_encoders_in_fp16(encoder: Encoder, ids: TokenBatch, tmp_path: Path) -> None:
    """The cached rows are the encoder's rows rounded to fp16, with the lengths and keep masks of the ids."""
    found = cached_states(encoder.backbone, ids, tmp_path)
    np.testing.assert_array_equal(found.values, encoder.backbone.encode(ids).numpy().astype(np.float16))
    assert found.values.dtype == np.float16
    np.testing.assert_array_equal(found.lengths, ids.lengths)
    np.testing.assert_array_equal(found.keep, ids.keep)


def test_a_second_call_encodes_nothing(encoder: Encoder, ids: TokenBatch, tmp_path: Path) -> None:
    """What is on disk is read, not computed, and reported as done."""
    first = cached_states(encoder.backbone, ids, tmp_path)
    backbone = counting(encoder.backbone)
    seen: list[tuple[int, ...]] = []
    again = cached_states(backbone, ids, tmp_path, on_progress=lambda *done: seen.append(done))
    np.testing.assert_array_equal(again.values, first.values)
    backbone.encode.assert_not_called()
    assert seen == [(5, 5)]
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


def test_other_ids_lengths_or_encoders_have_other_files(encoder: Encoder, ids: TokenBatch, tmp_path: Path) -> None:
    """Each of what states depend on changes the file; the keep mask, on which they don't, does not."""
    other_values = ids.with_values(np.roll(ids.values, 1))
    other_lengths = TokenBatch(ids.values, ids.lengths[::-1].copy(), ids.keep)
    other_keep = TokenBatch(ids.values, ids.lengths, ~ids.keep)
    other_encoder = counting(encoder.backbone)
    other_encoder.identity = replace(encoder.backbone.identity, weights_sha256="0" * 64)
    counts = []
    cases: list[tuple[Any, TokenBatch]] = [
        (encoder.backbone, ids),
        (encoder.backbone, other_values),
        (encoder.backbone, other_lengths),
        (other_encoder, ids),
        (encoder.backbone, other_keep),
    ]
    for backbone, batch in cases:
        cached_states(backbone, batch, tmp_path)
        counts.append(len(list(tmp_path.glob("*.npy"))))
    assert counts == [1, 2, 3, 4, 4]


def test_an_interrupted_call_goes_on(
    encoder: Encoder, ids: TokenBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption nothing is under the final name, what was done stays, and the result is the same."""
    monkeypatch.setattr(features, "CHUNK_SEQUENCES", 2)
    whole = np.array(cached_states(encoder.backbone, ids, tmp_path / "whole").values)

    def interrupt(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_states(encoder.backbone, ids, tmp_path, on_progress=interrupt)
    assert list(tmp_path.glob("*.npy")) == []
    backbone = counting(encoder.backbone)
    found = cached_states(backbone, ids, tmp_path)
    np.testing.assert_array_equal(found.values, whole)
    assert backbone.encode.call_count == 1
    assert [path.name for path in tmp_path.glob("*.progress")] == []


def test_states_beyond_fp16_are_refused(encoder: Encoder, ids: TokenBatch, tmp_path: Path) -> None:
    """States that fp16 can't hold, or NaN, are an error and are never kept."""
    for bad in (1e5, float("nan")):
        backbone = counting(encoder.backbone)
        backbone.encode = Mock(return_value=torch.full((len(ids.values), backbone.width), bad))
        with pytest.raises(NumericalError, match="fp16 ends at 65504"):
            cached_states(backbone, ids, tmp_path)
    assert list(tmp_path.glob("*.npy")) == []


def test_several_stores_read_as_one(encoder: Encoder, ids: TokenBatch, tmp_path: Path) -> None:
    """Sequence numbers run on from one store to the next, and any order may be asked for."""
    states = cached_states(encoder.backbone, ids, tmp_path)
    joined = Features((states.select([0, 1]), states.select([2]), states.select([3, 4])))
    assert len(joined) == 5
    for order in ([0, 1, 2, 3, 4], [4, 0, 2, 0], [3], [1, 0]):
        found, expected = joined.select(np.array(order)), states.select(order)
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.lengths, expected.lengths)
        np.testing.assert_array_equal(found.keep, expected.keep)


def test_states_as_tensors_are_fp32(encoder: Encoder, ids: TokenBatch, tmp_path: Path) -> None:
    """A read-only memory map becomes an fp32 tensor of its own."""
    states = cached_states(encoder.backbone, ids, tmp_path)
    tensor = as_tensor(states, torch.device("cpu"))
    assert tensor.dtype == torch.float32
    np.testing.assert_array_equal(tensor.numpy(), states.values.astype(np.float32))


def test_mean_pooling_covers_every_token() -> None:
    """The vector of a sequence is the normalised mean over all its tokens, kept or not."""
    values = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]], dtype=np.float16)
    batch = TokenBatch(values, np.array([2, 1], dtype=np.int32), np.array([True, False, True]))
    np.testing.assert_allclose(mean_pooled(batch), [np.array([0.5, 1.0]) / np.hypot(0.5, 1.0), [0.6, 0.8]], rtol=1e-6)
