"""What the application tells of itself: conventional names, true numbers, and nothing that grows with what is asked."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy import metrics
from deploy.ingress_stats import label_set_readings
from deploy.label_cache import metrics as label_cache_metrics
from deploy.label_sets import LabelSetStats
from deploy.metrics import ModelInfo, StageTimes
from deploy.telemetry import Metric, NoSink, Reading
from deploy.wire import ReplicaLostError
from tokenalign.errors import FingerprintMismatchError

ALL = [
    value for module in (metrics, label_cache_metrics) for value in vars(module).values() if isinstance(value, Metric)
]
UNITS = ("_seconds", "_bytes", "_ratio")


class Observed(NoSink):
    """Keeps what histograms were told."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], list[float]] = {}

    def observe(self, metric: Metric, value: float, tags: Mapping[str, str]) -> None:
        assert tags.keys() == set(metric.tag_keys)
        key = (metric.name.removeprefix("tokenalign_"), *(tags[key] for key in metric.tag_keys))
        self.values.setdefault(key, []).append(value)


def read(readings: Iterable[Reading]) -> dict[tuple[str, ...], float]:
    """The values by name and tags."""
    return {(reading.metric.name.removeprefix("tokenalign_"), *reading.tags): reading.value for reading in readings}


class TestNames:
    @pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
    def test_conventions(self, metric: Metric) -> None:
        """Prometheus' conventions: the application's name first, base units, _total for counters and nothing else."""
        assert re.fullmatch(r"tokenalign(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(ms|milli|micro|kb|mb|percent|count|sum|bucket)(_|$)", metric.name)
        assert bool(metric.boundaries) == (metric.kind == "histogram")
        assert list(metric.boundaries) == sorted(set(metric.boundaries))
        assert metric.description.endswith(".")

    def test_each_has_one_name(self) -> None:
        """No two metrics share a name."""
        names = [metric.name for metric in ALL]
        assert len(set(names)) == len(names)

    def test_labels_are_few(self) -> None:
        """A label's values are a choice of ours: nothing that a caller sends is one, nor an id of a request."""
        chosen = {"route", "status", "stage", "reason", "result", "change", "kind", "tier", "source", "state"}
        of_the_settings = {"model", "fingerprint", "key"}  # the names of models and of API keys
        assert {key for metric in ALL for key in metric.tag_keys} == chosen | of_the_settings


class TestIngress:
    async def test_texts_and_batches(self, run_stack: Any, bert: Any) -> None:
        """Texts, their tokens and cuts are counted; each batch tells its size, fill, wait and time once."""
        sink = Observed()
        async with run_stack(bert, sink=sink, batching={"max_batch_tokens": 4_096}) as stack:
            before = read(stack.ingress.readings())
            sink.values.clear()
            await stack.ask(texts=["card", "card", "long " * 200], labels=["a b", "c"])
            after = read(stack.ingress.readings())
        added = {key: after[key] - before[key] for key in after if key[0] in ("texts_total", "truncated_texts_total")}
        assert added == {("texts_total",): 3, ("truncated_texts_total",): 1}
        [tokens], [fill] = sink.values["batch_tokens",], sink.values["batch_fill_ratio",]
        assert sink.values["batch_texts",] == [3]
        assert tokens == after["text_tokens_total",] - before["text_tokens_total",] - 3  # an equal text once
        assert fill == tokens / 4_096
        assert len(sink.values["queue_wait_seconds",]) == len(sink.values["batch_seconds",]) == 1

    async def test_the_queue(self, stack: Any, until: Any) -> None:
        """What waits is told while it waits, with the slots that there are."""
        stack.slots = 0
        waiting = asyncio.create_task(stack.ask(texts=["card", "cash"], labels=["a", "b"]))
        await until(lambda: stack.waiting_texts == 2)
        during = read(stack.ingress.readings())
        stack.slots = 2
        await waiting
        after = read(stack.ingress.readings())
        names = ("queued_texts", "queued_tokens", "batches_in_flight", "batch_slots")
        assert [during[name,] for name in names] == [2, 6, 0, 0]
        assert [after[name,] for name in names] == [0, 0, 0, 2]

    @pytest.mark.parametrize(
        ("error", "reason"),
        [(ReplicaLostError("gone"), "replica_lost"), (FingerprintMismatchError("rows", "a", "b"), "other_model")],
    )
    async def test_second_tries(self, stack: Any, error: Exception, reason: str) -> None:
        """A batch that is sent again is counted by what befell the first."""
        stack.failures = [error]
        await stack.ask(text="card", labels=["a", "b"])
        assert read(stack.ingress.readings())["batch_retries_total", reason] == 1

    def test_label_sets(self) -> None:
        """Each counter of label sets is in a metric, by itself."""
        fields = LabelSetStats.__slots__
        for field in fields:
            assert [r.value for r in label_set_readings(LabelSetStats(**{field: 7})) if r.value] == [7], field
        assert len(list(label_set_readings(LabelSetStats()))) == len(fields)


class TestScorerAndEncoder:
    async def test_passes_and_tokens(self, run_stack: Any, bert: Any) -> None:
        """Tokens of documents and of labels are counted apart, and each pass has a time; so have stages of a batch."""
        sink = Observed()
        async with run_stack(bert, sink=sink) as stack:
            before = read(stack.encoder.readings())
            sink.values.clear()
            await stack.ask(text="card", labels=["new label", "and another"])
            after = read(stack.encoder.readings())
        for kind in ("documents", "labels"):
            assert after["encoder_tokens_total", kind] > before["encoder_tokens_total", kind]
            assert len(sink.values["encoder_pass_seconds", kind]) == 1
        assert after["encoder_tokens_in_hand",] == 0
        for stage in ("rows and labels", "scores"):
            assert len(sink.values["scorer_stage_seconds", stage]) == 1
        assert sink.values["label_cache_lookup_seconds", "encoder"]

    async def test_labels_that_are_cut(self, stack: Any) -> None:
        """They are counted once, when their set is first met."""
        for _ in range(2):
            await stack.ask(text="card", labels=["cash " * 200, "b"])
        assert read(stack.scorer.readings())["truncated_labels_total",] == 1

    async def test_all_say_which_model_they_serve(self, stack: Any) -> None:
        """Ingress, scorer and encoder tell the same name and fingerprint, the one of `/v1/model`."""
        info = (await stack.client.get("/v1/model")).json()
        for part in (stack.ingress, stack.scorer, stack.encoder):
            assert read(part.readings())["model_info", info["name"], info["fingerprint"]] == 1


class TestModelInfo:
    def test_a_model_of_before(self) -> None:
        """A gauge stays as it was set, so a model that is served no more is told as 0."""
        info = ModelInfo()
        assert read(info.readings({"a": "1"})) == {("model_info", "a", "1"): 1}
        assert read(info.readings({"a": "2"})) == {("model_info", "a", "1"): 0, ("model_info", "a", "2"): 1}


def test_stage_times() -> None:
    """Sum and number of each stage's runs."""
    times = StageTimes()
    for seconds in (0.25, 0.5):
        times.add("parse", seconds)
    times.add("read", 1.0)
    assert read(times.readings()) == {
        ("ingress_stage_seconds_total", "parse"): 0.75,
        ("ingress_stage_seconds_total", "read"): 1.0,
        ("ingress_stage_runs_total", "parse"): 2,
        ("ingress_stage_runs_total", "read"): 1,
    }


def test_each_is_in_the_run_book() -> None:
    """docs/operations.md has the name, tags, kind and description of each that is not the label cache's, in order."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(tokenalign_\w+)`(?: by (.*?))? \| (\w+) \| (.*?) \|$", page, flags=re.MULTILINE)
    own = [value for value in vars(metrics).values() if isinstance(value, Metric)]
    assert found == [(m.name, ", ".join(m.tag_keys), m.kind, m.description) for m in own]
