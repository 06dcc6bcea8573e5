"""Alerts and dashboards ask only for what a running application exports, with labels that are there."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy import metrics
from deploy.label_cache import metrics as label_cache_metrics
from deploy.telemetry import Metric

OWN = [v for module in (metrics, label_cache_metrics) for v in vars(module).values() if isinstance(v, Metric)]
NAME = re.compile(r"\bray_[a-z][a-z0-9_]*")
ON_EVERY_SERIES = {"deployment", "replica"}  # of RaySink, for what runs in a replica
FROM_PROMETHEUS = {"instance", "le"}


def expressions(manifests: Any) -> Iterator[tuple[str, str]]:
    """(where, query) of every alert and every panel."""
    for rule in manifests.of("PrometheusRule"):
        for group in rule["spec"]["groups"]:
            for alert in group["rules"]:
                yield alert["alert"], alert["expr"]
    for dashboard in dashboards(manifests):
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"]


def dashboards(manifests: Any) -> Iterator[Any]:
    """Every dashboard that Grafana would find."""
    for document in manifests.of("ConfigMap"):
        if document["metadata"].get("labels", {}).get("grafana_dashboard"):
            for text in document["data"].values():
                yield json.loads(text)


def own_metric(name: str) -> Metric | None:
    """The metric of ours that a series of Prometheus belongs to."""
    bare = name.removeprefix("ray_")
    for metric in OWN:
        series = {metric.name}
        if metric.kind == "histogram":
            series = {f"{metric.name}_{end}" for end in ("bucket", "sum", "count")}
        if bare in series:
            return metric
    return None


@pytest.fixture(scope="module")
def rays_words() -> str:
    """The sources of the installed Ray in which its metrics are named."""
    root = Path(ray.__file__).parent
    files = [*(root / "serve" / "_private").glob("*.py"), root / "dashboard/modules/reporter/reporter_agent.py"]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def is_rays(name: str, words: str) -> bool:
    """Whether Ray names such a metric; the names of those by protocol are put together when they are made."""
    bare = re.sub(r"_(total|bucket|sum|count)$", "", name.removeprefix("ray_"))
    forms = {bare, bare.replace("_http_", "_{protocol_name}_"), bare.replace("serve_http_", "serve_{protocol_name}_")}
    return any(re.search(rf'"{re.escape(form)}"', words) for form in forms)


def test_something_is_watched(manifests: Any) -> None:
    """The gpu overlay brings alerts and a dashboard, each panel with a query; the one for trying out brings none."""
    found = list(expressions(manifests))
    assert (len(found) > 20) == (manifests.overlay != "cpu-dev")
    for dashboard in dashboards(manifests):
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
        assert len(set(places)) == len(places) == len({p["id"] for p in dashboard["panels"]})
        assert all(p["description"] and p["targets"] for p in dashboard["panels"])


def test_every_query_names_a_metric_that_exists(manifests: Any, rays_words: str) -> None:
    """Each is one of ours, of its kind, or is named in the installed Ray."""
    for where, query in expressions(manifests):
        names = NAME.findall(re.sub(r"\b(?:by|without)\s*\([^)]*\)", "", query))
        assert names, where
        for name in names:
            if name.startswith("ray_tokenalign_"):
                assert own_metric(name) is not None, f"{where}: {name}"
            else:
                assert is_rays(name, rays_words), f"{where}: {name}"


def test_queries_of_ours_use_labels_that_are_there(manifests: Any) -> None:
    """A sum by, or a selector of, a label that the metric lacks is always empty."""
    for where, query in expressions(manifests):
        owned = [metric for metric in map(own_metric, NAME.findall(query)) if metric is not None]
        if not owned:
            continue
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query))
        labels |= {label.strip() for by in re.findall(r"\bby\s*\(([^)]*)\)", query) for label in by.split(",")}
        known = ON_EVERY_SERIES | FROM_PROMETHEUS | {key for metric in owned for key in metric.tag_keys}
        assert labels <= known, where


def test_counters_are_asked_for_their_rate(manifests: Any) -> None:
    """A counter's value means nothing after a restart, and a gauge has no rate."""
    for where, query in expressions(manifests):
        for match in NAME.finditer(query):
            counts = re.search(r"_(total|bucket|sum|count)$", match[0]) is not None
            assert query[: match.start()].endswith(("rate(", "increase(")) == counts, f"{where}: {match[0]}"


def test_the_check_can_fail(rays_words: str) -> None:
    """A metric that was renamed, or is of another kind, is found."""
    assert is_rays("ray_serve_num_http_requests_total", rays_words)
    assert not is_rays("ray_serve_http_request_total", rays_words)
    assert own_metric("ray_tokenalign_label_cache_lookup_seconds_bucket") is not None
    assert own_metric("ray_tokenalign_label_cache_lookup_seconds") is None
    assert own_metric("ray_tokenalign_label_cache_hit_total") is None


def test_alerts_say_what_to_do(manifests: Any) -> None:
    """Each has a name of its own, under which the run-book says what it means; and the run-book has no other."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    alerts = [
        alert["alert"] for one in manifests.of("PrometheusRule") for g in one["spec"]["groups"] for alert in g["rules"]
    ]
    assert len(set(alerts)) == len(alerts)
    if alerts:
        assert re.findall(r"^### `(Tokenalign\w+)`$", page, flags=re.MULTILINE) == alerts


def test_dashboards_are_made_from_their_panels(load_script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The files are what dashboards.py writes, and a change of one would be found."""
    script = load_script("components/monitoring/dashboards.py")
    assert script.main(["--check"]) == 0, capsys.readouterr().out
    script.DASHBOARDS["cache.json"] = ("another", *script.DASHBOARDS["cache.json"][1:])
    assert script.main(["--check"]) == 1
