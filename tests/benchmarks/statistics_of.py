"""Medians, percentiles and ratios of repeated measurements."""

import math
import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """The middle value; NaN of none, so that a report can say that nothing was measured."""
    return statistics.median(values) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values don't exceed (nearest rank); NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of pairs measured one after the other, which a drifting machine changes least."""
    return median([n / d for n, d in zip(numerators, denominators, strict=True)])


def spread(values: Sequence[float]) -> float:
    """Largest less smallest value, relative to the median: how much the repeats disagree."""
    return (max(values) - min(values)) / median(values) if values and median(values) else math.nan


def without_generator(rate: float, generator_share: float) -> float:
    """The rate that all cores would give if the load generator took none of them.

    generator_share: of all cores together, 0..1
    """
    if not 0 <= generator_share < 1:
        raise ValueError(f"the generator's share is {generator_share}; it must be at least 0 and below 1")
    return rate / (1 - generator_share)
