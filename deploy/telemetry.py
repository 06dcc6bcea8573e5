"""Numbers that parts of the application keep, told to whoever collects metrics: on Ray, `ray.util.metrics`.

A part counts in plain fields and gives `Reading`s of them; it needs neither Ray nor a collector. An `Exporter` reads
them now and then, so that counting costs a request nothing. What has a duration is told to the sink when it happened.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # Ray takes a second to import, and who only counts doesn't need it
    from ray.util.metrics import Counter, Gauge, Histogram

PERIOD_S = 5.0
"""Half of what Ray takes between two reports."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as Prometheus knows it; `boundaries` are the upper bounds of a histogram's buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    tag_keys: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What a counter or a gauge says now. `tags` are in the order of the metric's keys."""

    metric: Metric
    value: float
    tags: tuple[str, ...] = ()


class Sink(Protocol):
    """Where metrics go. Tags have exactly the metric's keys."""

    def add(self, metric: Metric, amount: float, tags: Mapping[str, str]) -> None:
        """Adds a positive amount to a counter."""

    def set(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """Sets a gauge."""

    def observe(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """Adds one value to a histogram."""


class NoSink:
    """Tells nobody."""

    def add(self, metric: Metric, amount: float, tags: Mapping[str, str]) -> None:
        """See `Sink.add`."""

    def set(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """See `Sink.set`."""

    def observe(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """See `Sink.observe`."""


class RaySink:
    """Ray's metrics, which its agents give to Prometheus under names that begin with `ray_`. Works without a cluster.

    common_tags: added to each metric, such as the replica, without which several would write one gauge in turn
    """

    def __init__(self, common_tags: Mapping[str, str] | None = None) -> None:
        from ray.util import metrics

        self._ray = metrics
        self._common_tags = dict(common_tags or {})
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def add(self, metric: Metric, amount: float, tags: Mapping[str, str]) -> None:
        """See `Sink.add`."""
        if metric.name not in self._counters:
            self._counters[metric.name] = self._ray.Counter(metric.name, metric.description, self._tag_keys(metric))
        self._counters[metric.name].inc(amount, {**self._common_tags, **tags})

    def set(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """See `Sink.set`."""
        if metric.name not in self._gauges:
            self._gauges[metric.name] = self._ray.Gauge(metric.name, metric.description, self._tag_keys(metric))
        self._gauges[metric.name].set(value, {**self._common_tags, **tags})

    def observe(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        """See `Sink.observe`."""
        if metric.name not in self._histograms:
            self._histograms[metric.name] = self._ray.Histogram(
                metric.name, metric.description, list(metric.boundaries), self._tag_keys(metric)
            )
        self._histograms[metric.name].observe(value, {**self._common_tags, **tags})

    def _tag_keys(self, metric: Metric) -> tuple[str, ...]:
        return (*self._common_tags, *metric.tag_keys)


class Exporter:
    """Tells a sink what sources read, and of counters only what was added since the last time."""

    def __init__(self, sink: Sink, *sources: Callable[[], Iterable[Reading]]) -> None:
        self._sink = sink
        self._sources = sources
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def publish(self) -> None:
        """Reads all sources once."""
        for source in self._sources:
            for reading in source():
                self._tell(reading)

    async def follow(self, period_s: float = PERIOD_S) -> None:
        """Publishes again and again, until it is cancelled; an error is logged, and the next round tries again."""
        while True:
            try:
                self.publish()
            except Exception:
                logger.exception("metrics could not be published")
            await asyncio.sleep(period_s)

    def _tell(self, reading: Reading) -> None:
        metric = reading.metric
        tags = dict(zip(metric.tag_keys, reading.tags, strict=True))
        if metric.kind == "gauge":
            self._sink.set(metric, reading.value, tags)
            return
        key = (metric.name, reading.tags)
        added = reading.value - self._told.get(key, 0.0)
        if added < 0:  # what counted was replaced, and the new one began at zero
            added = reading.value
        self._told[key] = reading.value
        if added > 0:
            self._sink.add(metric, added, tags)
