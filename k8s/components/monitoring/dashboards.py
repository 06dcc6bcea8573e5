"""Writes the Grafana dashboards beside it, service.json and cache.json, from the panels below.

`python k8s/components/monitoring/dashboards.py` writes them; `--check` changes nothing and ends with 1 when one is out
of date. A panel is a title, what it shows, a unit of Grafana's, and queries by the legend of what they give.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REQUESTS = 'ray_tokenalign_http_request_seconds_count{route!~"/health/.*"}'
APPLICATION = '{application="tokenalign"}'
OR_NONE = '{application=~"(tokenalign)?"}'  # of errors where no ingress was reached


@dataclass(frozen=True)
class Panel:
    """One panel, half a row wide."""

    title: str
    description: str
    unit: str
    queries: dict[str, str]


def per_second(series: str, *by: str) -> str:
    """How much a counter grew in a second."""
    return f"sum{_by(by)} (rate({series}[$__rate_interval]))"


def quantile(share: float, histogram: str, *by: str, where: str = "") -> str:
    """A quantile of a histogram's values."""
    return f"histogram_quantile({share}, {per_second(f'{histogram}_bucket{where}', 'le', *by)})"


def mean(total: str, number: str, *by: str) -> str:
    """The mean of what two counters add up and count."""
    return f"{per_second(total, *by)} / {per_second(number, *by)}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


_CLASSIFY = '{route="/v1/classify", status="200"}'
_REFUSED = '{status="429"}'

SERVICE = (
    Panel(
        "Requests by status",
        "Answers a second, probes left out. 499: the caller left before.",
        "reqps",
        {"{{status}}": per_second(REQUESTS, "status")},
    ),
    Panel("Requests by route", "Which interface is used.", "reqps", {"{{route}}": per_second(REQUESTS, "route")}),
    Panel(
        "Latency of /v1/classify",
        "From arrival in the ingress to the answer's last byte, of good answers.",
        "s",
        {
            f"p{100 * share:g}": quantile(share, "ray_tokenalign_http_request_seconds", where=_CLASSIFY)
            for share in (0.5, 0.95, 0.99)
        },
    ),
    Panel(
        "Time to a refusal",
        "How long a caller waits for a 429. It should be a few milliseconds whatever the load.",
        "s",
        {
            f"p{100 * share:g}": quantile(share, "ray_tokenalign_http_request_seconds", where=_REFUSED)
            for share in (0.5, 0.95)
        },
    ),
    Panel(
        "Errors in front of the ingress",
        "Errors that Serve's proxies gave or passed on. More here than above: no ingress was reached.",
        "reqps",
        {
            "{{error_code}}": per_second(f"ray_serve_num_http_error_requests_total{OR_NONE}", "error_code"),
        },
    ),
    Panel(
        "Requests refused by the gate",
        "By API key and reason: no or wrong key, or more than the key's quota.",
        "reqps",
        {"{{key}} {{reason}}": per_second("ray_tokenalign_refused_requests_total", "key", "reason")},
    ),
    Panel(
        "Stages of a request, mean",
        "wait: queued, encoded and scored. The others are the ingress's own work, which occupies its one core.",
        "s",
        {
            "{{stage}}": mean(
                "ray_tokenalign_ingress_stage_seconds_total", "ray_tokenalign_ingress_stage_runs_total", "stage"
            )
        },
    ),
    Panel(
        "The ingress's queue",
        "Texts that wait for a batch, and the time that the oldest of each batch had waited.",
        "short",
        {
            "texts": "sum(ray_tokenalign_queued_texts)",
            "requests in progress": "sum(ray_tokenalign_http_requests_in_progress)",
        },
    ),
    Panel(
        "Wait in the queue, and time of a batch",
        "p95. A batch's time is encoding and scoring, the way there and back included.",
        "s",
        {
            "wait": quantile(0.95, "ray_tokenalign_queue_wait_seconds"),
            "batch": quantile(0.95, "ray_tokenalign_batch_seconds"),
        },
    ),
    Panel(
        "Batches",
        "Batches in flight, and how many may be: as many as encoders times batching.batches_per_encoder.",
        "short",
        {"in flight": "sum(ray_tokenalign_batches_in_flight)", "slots": "sum(ray_tokenalign_batch_slots)"},
    ),
    Panel(
        "Size of a batch, mean",
        "Texts and tokens. Small ones under load: too many slots, or too few texts a request.",
        "short",
        {
            "texts": mean("ray_tokenalign_batch_texts_sum", "ray_tokenalign_batch_texts_count"),
            "tokens": mean("ray_tokenalign_batch_tokens_sum", "ray_tokenalign_batch_tokens_count"),
        },
    ),
    Panel(
        "Fill of a batch, mean",
        "Its tokens as a part of batching.max_batch_tokens.",
        "percentunit",
        {"fill": mean("ray_tokenalign_batch_fill_ratio_sum", "ray_tokenalign_batch_fill_ratio_count")},
    ),
    Panel(
        "Encoded tokens",
        "Of documents and of labels that were in no cache.",
        "short",
        {"{{kind}}": per_second("ray_tokenalign_encoder_tokens_total", "kind")},
    ),
    Panel(
        "Forward passes and scoring, p95",
        "A pass of an encoder, and a scorer's two stages.",
        "s",
        {
            "pass: {{kind}}": quantile(0.95, "ray_tokenalign_encoder_pass_seconds", "kind"),
            "scorer: {{stage}}": quantile(0.95, "ray_tokenalign_scorer_stage_seconds", "stage"),
        },
    ),
    Panel(
        "What the autoscaler goes by",
        "Tokens in the encoders' hands, and tokens that wait in front of them.",
        "short",
        {
            "in hand": "sum(ray_tokenalign_encoder_tokens_in_hand)",
            "queued": "max(ray_tokenalign_encoder_tokens_queued)",
        },
    ),
    Panel(
        "Replicas",
        "Those that should run, and those that do.",
        "short",
        {
            "{{deployment}} wanted": f"max by (deployment) (ray_serve_autoscaling_target_replicas{APPLICATION})",
            "{{deployment}} healthy": f"sum by (deployment) (ray_serve_deployment_replica_healthy{APPLICATION})",
        },
    ),
    Panel(
        "Models served",
        "Replicas by model and fingerprint. Two fingerprints of one model: a rolling update.",
        "short",
        {"{{model}} {{fingerprint}}": "sum by (model, fingerprint) (ray_tokenalign_model_info)"},
    ),
    Panel(
        "Second tries of batches",
        "By what befell the first: a replica that was lost, or one with another model.",
        "ops",
        {"{{reason}}": per_second("ray_tokenalign_batch_retries_total", "reason")},
    ),
    Panel(
        "Truncated texts",
        "Texts of which the end was not read, as a part of all.",
        "percentunit",
        {"texts": mean("ray_tokenalign_truncated_texts_total", "ray_tokenalign_texts_total")},
    ),
    Panel(
        "CPU and memory by node",
        "As Ray's agent on the node sees them.",
        "percent",
        {
            "CPU {{instance}}": "avg by (instance) (ray_node_cpu_utilization)",
            "memory {{instance}}": (
                "100 * sum by (instance) (ray_node_mem_used)"
                " / sum by (instance) (ray_node_mem_used + ray_node_mem_available)"
            ),
        },
    ),
    Panel(
        "GPU by node",
        "Use of each GPU; empty where there is none.",
        "percent",
        {"{{instance}} {{GpuIndex}}": "avg by (instance, GpuIndex) (ray_node_gpus_utilization)"},
    ),
)

CACHE = (
    Panel(
        "Hits",
        "Look-ups a second that found what they looked for: whole lists in memory and in list, labels in label.",
        "ops",
        {"{{tier}}": per_second("ray_tokenalign_label_cache_hits_total", "tier")},
    ),
    Panel(
        "Misses",
        "By what was in the way. absent is the first time; checksum, version or shape is a damaged or foreign entry.",
        "ops",
        {"{{tier}}: {{reason}}": per_second("ray_tokenalign_label_cache_misses_total", "tier", "reason")},
    ),
    Panel(
        "Time to the rows, p95",
        "Of a request's labels, by the furthest place that was needed.",
        "s",
        {"{{source}}": quantile(0.95, "ray_tokenalign_label_cache_lookup_seconds", "source")},
    ),
    Panel(
        "Labels encoded, and spared",
        "What the cache could not save the encoders, and what it did, by where it came from.",
        "ops",
        {
            "encoded": per_second("ray_tokenalign_label_cache_encoded_labels_total"),
            "spared: {{source}}": per_second("ray_tokenalign_label_cache_encodings_saved_total", "source"),
        },
    ),
    Panel(
        "Memory of scorers",
        "Bytes of lists in each scorer; label_cache.memory_bytes is the most.",
        "bytes",
        {"{{replica}}": "sum by (replica) (ray_tokenalign_label_cache_held_bytes)"},
    ),
    Panel(
        "Evictions",
        "Lists that memory had no room for, and entries that the store had lost.",
        "ops",
        {"{{tier}}": per_second("ray_tokenalign_label_cache_evictions_total", "tier")},
    ),
    Panel(
        "The store: traffic",
        "Bytes a second; a request for a list in memory sends the store nothing.",
        "Bps",
        {
            "read": per_second("ray_tokenalign_label_cache_read_bytes_total"),
            "written": per_second("ray_tokenalign_label_cache_written_bytes_total"),
        },
    ),
    Panel(
        "The store: questions",
        "Round trips a second, and writes that were dropped since too many were under way.",
        "ops",
        {
            "round trips": per_second("ray_tokenalign_label_cache_store_round_trips_total"),
            "dropped writes": per_second("ray_tokenalign_label_cache_skipped_writes_total"),
        },
    ),
    Panel(
        "The store: failures",
        "Failed reads and writes a second, by reason, and replicas whose breaker is open.",
        "short",
        {
            "{{reason}}": per_second("ray_tokenalign_label_cache_store_errors_total", "reason"),
            "breakers open": 'sum(ray_tokenalign_label_store_breaker_state{state="open"})',
        },
    ),
    Panel(
        "Waiting for other replicas",
        "Labels a second that another replica was encoding, and those that it failed to bring or did not in time.",
        "ops",
        {
            "waited for": per_second("ray_tokenalign_label_cache_lock_waits_total"),
            "taken over": per_second("ray_tokenalign_label_cache_lock_takeovers_total"),
            "timed out": per_second("ray_tokenalign_label_cache_lock_timeouts_total"),
        },
    ),
    Panel(
        "Label sets looked up",
        "By where they were found. stale_memory and store_failed: the store did not answer.",
        "ops",
        {"{{result}}": per_second("ray_tokenalign_label_set_lookups_total", "result")},
    ),
    Panel(
        "Label sets changed",
        "Defined, deleted, and values that were no definition.",
        "ops",
        {
            "{{change}}": per_second("ray_tokenalign_label_set_changes_total", "change"),
            "damaged": per_second("ray_tokenalign_label_sets_damaged_total"),
        },
    ),
)

DASHBOARDS = {
    "service.json": ("tokenalign", "tokenalign", SERVICE),
    "cache.json": ("tokenalign: label cache", "tokenalign-cache", CACHE),
}


def dashboard(title: str, uid: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Grafana's form of a dashboard, two panels a row."""
    return {
        "title": title,
        "uid": uid,
        "tags": ["tokenalign"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every file is as it should be, 1 when --check found one that is not."""
    parser = argparse.ArgumentParser(description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 when a file is out of date")
    check, stale = parser.parse_args(arguments).check, False
    for name, described in DASHBOARDS.items():
        path, text = FOLDER / name, json.dumps(dashboard(*described), indent=1) + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale = True
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{name}: {'out of date; run python k8s/components/monitoring/dashboards.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
