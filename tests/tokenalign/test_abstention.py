"""When an answer names no label."""

from typing import Any

import numpy as np
import pytest

from tokenalign.abstention import Thresholds
from tokenalign.config import ModelConfig
from tokenalign.errors import InputError

SCORES = np.array([0.125, 0.625, 0.25], dtype=np.float32)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"min_score": 0.625}, None),
        ({"min_score": 0.7}, {"reason": "min_score", "value": 0.625, "limit": 0.7}),
        ({"min_margin": 0.375}, None),
        ({"min_margin": 0.5}, {"reason": "min_margin", "value": 0.375, "limit": 0.5}),
        ({"min_score": 1, "min_margin": 1}, {"reason": "min_score", "value": 0.625, "limit": 1.0}),
        ({"min_score": 0, "min_margin": 0}, None),
    ],
)
def test_the_first_limit_that_is_not_reached_is_the_reason(limits: Any, expected: Any) -> None:
    """The score is looked at before its lead; what is just at a limit has reached it; no limit asks for nothing."""
    assert Thresholds.of(**limits).abstention(SCORES) == expected


def test_ties_have_no_margin() -> None:
    """Two best scores that are equal lead over each other by nothing."""
    tied = np.array([0.5, 0.5], dtype=np.float32)
    assert Thresholds.of(min_margin=0.01).abstention(tied) == {"reason": "min_margin", "value": 0.0, "limit": 0.01}


@pytest.mark.parametrize("key", ["min_score", "min_margin"])
@pytest.mark.parametrize("value", [-0.1, 1.1, True, "0.5", float("nan"), float("inf"), 10**400, [0.5]])
def test_limits_out_of_bounds(key: str, value: Any) -> None:
    """Only a number from 0 to 1; the error names the key and the bounds."""
    with pytest.raises(InputError, match="from 0 to 1") as caught:
        Thresholds.of(**{key: value})
    assert caught.value.loc == (key,)


def test_a_margin_needs_two_labels() -> None:
    """With one label there is no second best; a least score is fine."""
    with pytest.raises(InputError, match="one label only; use min_score") as caught:
        Thresholds.of(min_margin=0.1, fewest_labels=1)
    assert caught.value.loc == ("min_margin",)
    assert Thresholds.of(min_score=0.1, fewest_labels=1).abstention(SCORES[:1]) is None


def config(**abstention: Any) -> ModelConfig:
    """A configuration whose head has been calibrated so, or not at all."""
    fitted = {"abstention": {"kept": 0.95, "labels": 3, **abstention}} if abstention else {}
    return ModelConfig.parse({"backbone": {"reference": "x/y"}, "backbone_width": 8, **fitted})


def test_a_calibrated_limit_is_the_models() -> None:
    """It is taken from the configuration, another one for independent scores; unasked nothing changes."""
    asked = Thresholds.of("calibrated", 0.1)
    model = config(min_score=0.7, multi_label_min_score=0.2)
    assert asked.resolved(model, multi_label=False) == Thresholds(0.7, 0.1)
    assert asked.resolved(model, multi_label=True) == Thresholds(0.2, 0.1)
    assert Thresholds.of(0.5).resolved(model, multi_label=False) == Thresholds(0.5)
    assert Thresholds.of().resolved(config(), multi_label=False) == Thresholds()


@pytest.mark.parametrize(
    ("model", "multi_label", "words"),
    [
        (config(), False, "has no calibrated limit; fit one with `tokenalign calibrate FOLDER`"),
        (config(min_score=0.7), True, "has no calibrated limit for independent scores"),
    ],
)
def test_a_model_without_a_calibrated_limit(model: ModelConfig, multi_label: bool, words: str) -> None:
    """The error names the model and how to get one."""
    with pytest.raises(InputError, match=words) as caught:
        Thresholds.of("calibrated").resolved(model, multi_label=multi_label)
    assert caught.value.loc == ("min_score",)


def test_a_margin_is_never_calibrated() -> None:
    """Only the score has a limit of the model's own."""
    with pytest.raises(InputError, match="from 0 to 1"):
        Thresholds.of(min_margin="calibrated")
