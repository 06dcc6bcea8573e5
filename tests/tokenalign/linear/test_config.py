"""A linear head's config.json: what is kept, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.errors import ConfigError
from tokenalign.linear.config import LinearConfig, ThresholdChoice, is_linear

CHOICE = {"threshold": 0.15, "texts": 56, "resamples": 100, "low": 0.1, "high": 0.3, "lowest": 0.05, "highest": 0.45}
VALUES: dict[str, Any] = {
    "backbone": {"reference": "a/b", "revision": "0" * 40},
    "backbone_width": 8,
    "labels": ["x", "y"],
    "mode": "multi_label",
    "pooling": "last",
    "threshold": CHOICE,
}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """And says by itself what kind of head it is of; the protocol's windows are the default."""
    config = LinearConfig.parse(VALUES)
    assert (config.window, config.stride) == (256, 128)
    assert not is_linear(tmp_path)
    config.save(tmp_path / "config.json")
    assert LinearConfig.load(tmp_path / "config.json") == config
    assert is_linear(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": ["x", "x"]}, "labels: .*twice|labels: .*same"),
        ({"labels": []}, "labels: "),
        ({"mode": "single_label"}, "threshold: a head of mode"),
        ({"threshold": None}, "threshold: a head of mode"),
        ({"mode": "single_label", "threshold": None, "labels": ["x"]}, "needs at least 2"),
        ({"temperature": 2.0}, "temperature: is 2.0"),
        ({"window": 16, "stride": 17}, "stride: 17 leaves gaps"),
        ({"strides": 4}, "strides: unknown key"),
        ({"kind": "alignment"}, "kind: "),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], said: str) -> None:
    """Each error names the key."""
    with pytest.raises(ConfigError, match=said):
        LinearConfig.parse(VALUES | changes)


@pytest.mark.parametrize(
    ("low", "high", "stable"), [(0.1, 0.2, True), (0.15, 0.15, True), (0.1, 0.25, False), (0.05, 0.15, False)]
)
def test_a_threshold_is_stable_within_a_step(low: float, high: float, stable: bool) -> None:
    """Neighbours on the grid are no news; more is a warning that says the range."""
    choice = ThresholdChoice.model_validate(CHOICE | {"low": low, "high": high})
    assert choice.stable is stable
    assert (choice.warning is None) is stable
    if choice.warning is not None:
        assert f"0.05 to 0.45 in 100 resamples of the 56 calibration texts, 90 % of them {low:.2f} to" in choice.warning


def test_an_alignment_heads_loader_says_where_to_go(tmp_path: Path) -> None:
    """Whoever loads or serves it as the other kind is told what answers it, not which keys are unknown."""
    LinearConfig.parse(VALUES).save(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"holds a linear head.*tokenalign --model.*not served over HTTP"):
        TokenAlignClassifier.from_pretrained(tmp_path, device="cpu")


def test_an_alignment_head_is_no_linear_one(bert_head: Path) -> None:
    """The other way round too."""
    assert not is_linear(bert_head)
    with pytest.raises(ConfigError, match="no linear head's; load an alignment head with TokenAlignClassifier"):
        LinearConfig.load(bert_head / "config.json")
