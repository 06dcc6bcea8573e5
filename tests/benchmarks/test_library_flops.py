"""The library's share of the machine's matrix speed."""

import pytest

from tests.benchmarks.library_flops import OfDtype


def test_the_peak_is_the_fastest_product() -> None:
    """Of all sizes and repeats: a product that was disturbed makes the library look no better."""
    found = OfDtype(2, {512: [50.0, 100.0], 1_024: [20.0, 30.0]}, [4.0, 5.0], 10.0)
    assert found.shares() == pytest.approx([0.4, 0.5])
