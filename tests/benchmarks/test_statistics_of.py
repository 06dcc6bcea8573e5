"""Numbers of repeated measurements."""

import math

import pytest

from tests.benchmarks.statistics_of import median, paired_ratio, percentile, spread, without_generator


def test_percentile_is_a_measured_value() -> None:
    """The nearest rank: of a hundred values the 99th is the 99th smallest, whatever their order."""
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [50, 99, 100]
    assert percentile([7.0], 50) == 7.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0


def test_nothing_measured_is_no_number() -> None:
    """Neither zero nor an error, so that a report can say so."""
    assert all(math.isnan(value) for value in (median([]), percentile([], 99), spread([])))


def test_pairs_bear_a_machine_that_drifts() -> None:
    """Ratios are taken within each pair: a machine that halves its speed between pairs changes nothing."""
    assert paired_ratio([80, 40, 20], [100, 50, 25]) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_ratio([1, 2], [1])


def test_spread_is_relative() -> None:
    """Largest less smallest, in parts of the median."""
    assert spread([90, 100, 120]) == pytest.approx(0.3)


def test_the_generator_is_taken_off() -> None:
    """What all cores would give if the generator ran elsewhere; a share of everything is refused."""
    assert without_generator(90, 0.1) == pytest.approx(100)
    assert without_generator(90, 0.0) == 90
    with pytest.raises(ValueError, match="below 1"):
        without_generator(90, 1.0)
