"""Metrics are told once, under the names that are promised, and cost no request anything."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ray.util import metrics as ray_metrics

from deploy.label_cache import CacheStats, MemoryStore
from deploy.label_cache import metrics as cache_metrics
from deploy.label_cache.breaker import BreakerStore
from deploy.label_cache.metrics import cache_readings, store_readings
from deploy.telemetry import Exporter, Metric, NoSink, RaySink, Reading

Until = Callable[[Callable[[], bool]], Any]

COUNT = Metric("count_total", "counter", "How many.", ("kind",))
SIZE = Metric("size", "gauge", "How large.")
TIME = Metric("time_seconds", "histogram", "How long.", ("kind",), (0.1, 1.0))


RAY_PROGRAM = """
import time, urllib.request
import ray

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)

@ray.remote
class Replica:
    def count(self):
        from deploy.label_cache import CacheStats
        from deploy.label_cache.metrics import LOOKUP_SECONDS, cache_readings
        from deploy.telemetry import Exporter, RaySink
        stats = CacheStats()
        stats.memory.hits, stats.memory.held_bytes = 3, 99
        stats.labels.misses["absent"] = 2
        self.sink = RaySink({"replica": "r1"})
        Exporter(self.sink, lambda: cache_readings(stats)).publish()
        self.sink.observe(LOOKUP_SECONDS, 0.003, {"source": "list"})

replica = Replica.remote()
ray.get(replica.count.remote())
[node] = ray.nodes()
url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
read = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
while True:
    try:
        text = read(url).read().decode()
    except OSError:
        text = ""
    if all(name in text for name in ("lookup_seconds_count", "held_bytes{", "hits_total{", "misses_total{")):
        break
    time.sleep(0.1)
print(text)
"""


class Collector(NoSink):
    """A sink that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, dict[str, str]]] = []

    def add(self, metric: Metric, amount: float, tags: Mapping[str, str]) -> None:
        assert amount > 0
        self.told.append((metric.name, amount, dict(tags)))

    def set(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        self.told.append((metric.name, value, dict(tags)))

    def take(self) -> list[tuple[str, float, dict[str, str]]]:
        told, self.told = self.told, []
        return told


@pytest.fixture
def collector() -> Collector:
    return Collector()


class TestExporter:
    def test_a_counter_is_told_what_was_added(self, collector: Collector) -> None:
        """Each round tells the difference to the one before, and nothing where there is none."""
        values = {"a": 3.0, "b": 0.0}
        exporter = Exporter(collector, lambda: [Reading(COUNT, value, (kind,)) for kind, value in values.items()])
        exporter.publish()
        assert collector.take() == [("count_total", 3.0, {"kind": "a"})]
        values.update(a=5.0, b=1.0)
        exporter.publish()
        assert collector.take() == [("count_total", 2.0, {"kind": "a"}), ("count_total", 1.0, {"kind": "b"})]
        exporter.publish()
        assert collector.take() == []

    def test_a_counter_that_began_anew(self, collector: Collector) -> None:
        """A counter below what it was is another one that began at zero."""
        value = 7.0
        exporter = Exporter(collector, lambda: [Reading(COUNT, value, ("a",))])
        exporter.publish()
        value = 2.0
        exporter.publish()
        assert [amount for _, amount, _ in collector.take()] == [7.0, 2.0]

    def test_a_gauge_is_told_as_it_is(self, collector: Collector) -> None:
        """Every round sets it, also to what it was."""
        exporter = Exporter(collector, lambda: [Reading(SIZE, 4.0)])
        exporter.publish()
        exporter.publish()
        assert collector.take() == [("size", 4.0, {})] * 2

    def test_tags_must_fit(self, collector: Collector) -> None:
        """A reading with too few tags is an error, not a metric under a wrong name."""
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            Exporter(collector, lambda: [Reading(COUNT, 1.0)]).publish()

    async def test_it_goes_on_after_an_error(
        self, collector: Collector, caplog: pytest.LogCaptureFixture, until: Until
    ) -> None:
        """A source that fails once is logged, and read again in the next round."""
        failures = iter([ValueError("broken")])

        def source() -> Iterator[Reading]:
            for error in failures:
                raise error
            yield Reading(SIZE, 1.0)

        following = asyncio.create_task(Exporter(collector, source).follow(0.001))
        await until(lambda: bool(collector.told))
        following.cancel()
        assert [record.message for record in caplog.records] == ["metrics could not be published"]


class TestRaySink:
    def test_metrics_are_rays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each kind goes to Ray's metric of that kind, made once, with the common tags added."""
        made: list[tuple[Any, ...]] = []
        told: list[tuple[Any, ...]] = []

        def fake(kind: str, method: str) -> type:
            def make(self: Any, *arguments: Any) -> None:
                made.append((kind, *arguments))

            def tell(self: Any, value: float, tags: dict[str, str]) -> None:
                told.append((kind, value, tags))

            return type(kind, (), {"__init__": make, method: tell})

        for kind, method in (("Counter", "inc"), ("Gauge", "set"), ("Histogram", "observe")):
            monkeypatch.setattr(ray_metrics, kind, fake(kind, method))
        sink = RaySink({"replica": "r1"})
        for _ in range(2):
            sink.add(COUNT, 2, {"kind": "a"})
            sink.set(SIZE, 3, {})
            sink.observe(TIME, 0.5, {"kind": "b"})
        assert made == [
            ("Counter", "count_total", "How many.", ("replica", "kind")),
            ("Gauge", "size", "How large.", ("replica",)),
            ("Histogram", "time_seconds", "How long.", [0.1, 1.0], ("replica", "kind")),
        ]
        assert told[:3] == [
            ("Counter", 2, {"replica": "r1", "kind": "a"}),
            ("Gauge", 3, {"replica": "r1"}),
            ("Histogram", 0.5, {"replica": "r1", "kind": "b"}),
        ]

    def test_it_works_without_a_cluster(self) -> None:
        """Where no Ray runs, telling is fine and starts none; what Ray refuses is seen here."""
        code = (
            "from deploy.label_cache.metrics import *\n"
            "from deploy.label_cache import CacheStats\n"
            "from deploy.telemetry import *\n"
            "stats = CacheStats(lock_waits=1)\n"
            "stats.lists.misses['absent'] = 2\n"
            "sink = RaySink({'replica': 'r1'})\n"
            "exporter = Exporter(sink, lambda: cache_readings(stats))\n"
            "exporter.publish(); exporter.publish()\n"
            "sink.observe(LOOKUP_SECONDS, 0.1, {'source': 'memory'})\n"
            "import ray; assert not ray.is_initialized()\n"
        )
        root = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=root)

    @pytest.mark.serve
    def test_what_prometheus_reads_from_ray(self) -> None:
        """A real Ray gives counters, gauges and histograms out under their names, with their tags."""
        done = subprocess.run(
            [sys.executable, "-c", RAY_PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_metrics_report_interval_ms": "500"},
        )
        lines = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines() if line.startswith("ray_tokenalign"))
        for name, tags, value in (
            ("label_cache_hits_total", ['tier="memory"', 'replica="r1"'], "3.0"),
            ("label_cache_misses_total", ['tier="label"', 'reason="absent"'], "2.0"),
            ("label_cache_held_bytes", ['replica="r1"'], "99.0"),
            ("label_cache_lookup_seconds_count", ['source="list"'], "1.0"),
        ):
            found = {line: number for line, number in lines.items() if line.startswith(f"ray_tokenalign_{name}{{")}
            assert [n for line, n in found.items() if all(tag in line for tag in tags)] == [value], name

    def test_who_only_counts_loads_no_ray(self) -> None:
        """The scorer and the label cache can be imported without Ray."""
        code = "import sys, deploy.scorer, deploy.telemetry; sys.exit('ray' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


class TestCacheMetrics:
    def test_every_counter_is_told(self, collector: Collector) -> None:
        """No field of the cache's counters is forgotten: each that changes shows in a metric."""
        tiers = ("memory", "lists", "labels")
        for name in vars(CacheStats()):
            stats = CacheStats()
            before = list(cache_readings(stats))
            value = getattr(stats, name)
            if name in tiers:
                for field in vars(value):
                    changed = CacheStats()
                    _raise(getattr(changed, name), field)
                    if (name, field) not in {(tier, "held_bytes") for tier in tiers[1:]}:  # only memory holds
                        assert list(cache_readings(changed)) != before, f"{name}.{field}"
            else:
                _raise(stats, name)
                assert list(cache_readings(stats)) != before, name

    def test_names_are_prometheus(self) -> None:
        """Names and tags are words, counters end in _total and nothing else does, times are in seconds."""
        found = [value for value in vars(cache_metrics).values() if isinstance(value, Metric)]
        assert len(found) > 15
        assert len({metric.name for metric in found}) == len(found)
        for metric in found:
            assert re.fullmatch(r"tokenalign_[a-z_]+", metric.name)
            assert metric.name.endswith("_total") == (metric.kind == "counter")
            assert bool(metric.boundaries) == (metric.kind == "histogram")
            assert metric.description.endswith(".")

    def test_reasons_are_tags(self, collector: Collector) -> None:
        """A miss is told with its tier and its reason."""
        stats = CacheStats()
        stats.labels.misses.update(absent=3, checksum=1)
        Exporter(collector, lambda: cache_readings(stats)).publish()
        misses = [(value, tags) for name, value, tags in collector.told if name.endswith("misses_total")]
        assert misses == [
            (3, {"tier": "label", "reason": "absent"}),
            (1, {"tier": "label", "reason": "checksum"}),
        ]

    def test_the_breakers_state(self) -> None:
        """Exactly one of the states is 1; a store without a breaker, or none, tells nothing."""
        readings = list(store_readings(BreakerStore(MemoryStore(1_000))))
        states = {reading.tags[0]: reading.value for reading in readings if reading.tags}
        assert states == {"closed": 1.0, "open": 0.0, "half_open": 0.0}
        assert list(store_readings(None)) == list(store_readings(MemoryStore(1_000))) == []


def _raise(counters: Any, name: str) -> None:
    value = getattr(counters, name)
    if isinstance(value, dict):
        value["reason"] += 1
    else:
        setattr(counters, name, value + 1)


class TestScorer:
    async def test_it_tells_of_its_cache(self, stack: Any, collector: Collector) -> None:
        """After a request the scorer's counters and metrics show it."""
        stats = stack.scorer.stats()
        exporter = Exporter(collector, stack.scorer.readings)
        exporter.publish()  # what the start took
        collector.take()
        await stack.ask(text="card", labels=["card payment", "cash"])
        await stack.ask(text="cash", labels=["card payment", "cash"])
        assert (stats.memory.hits, stats.encodings_saved["memory"]) == (1, 2)
        exporter.publish()
        assert ("tokenalign_label_cache_hits_total", 1, {"tier": "memory"}) in collector.told
        assert ("tokenalign_label_cache_encoded_labels_total", 2, {}) in collector.told
