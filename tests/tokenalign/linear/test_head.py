"""Logits of texts out of logits of windows."""

import numpy as np
import pytest

from tokenalign.linear.config import LinearConfig
from tokenalign.linear.head import label_wise_maximum, probabilities


def config(**values: object) -> LinearConfig:
    given = {"backbone": {"reference": "a/b"}, "backbone_width": 4, "labels": ["x", "y"], "pooling": "mean"}
    return LinearConfig.parse(given | values)


def test_each_label_takes_its_largest_window() -> None:
    """Label by label, and never from another text's windows."""
    logits = np.array([[1, -5], [-2, 3], [-9, -8], [7, 7]], dtype=np.float32)
    found = label_wise_maximum(logits, np.array([2, 1, 1], dtype=np.int32))
    assert found.tolist() == [[1, 3], [-9, -8], [7, 7]]


def test_probabilities_are_those_of_the_mode() -> None:
    """A softmax at the temperature, or a sigmoid of each."""
    logits = np.array([[0.0, np.log(4)]], dtype=np.float32)
    assert probabilities(logits, config(mode="single_label")).tolist() == [pytest.approx([0.2, 0.8])]
    assert probabilities(logits, config(mode="single_label", temperature=2.0)).tolist() == [
        pytest.approx([1 / 3, 2 / 3])
    ]
    choice = {"threshold": 0.5, "texts": 1, "resamples": 1, "low": 0.5, "high": 0.5, "lowest": 0.5, "highest": 0.5}
    multi = config(mode="multi_label", threshold=choice)
    assert probabilities(logits, multi).tolist() == [pytest.approx([0.5, 0.8])]
