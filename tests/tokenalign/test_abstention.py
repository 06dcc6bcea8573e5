"""When an answer names no label."""

from typing import Any

import numpy as np
import pytest

from tokenalign.abstention import Thresholds
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
