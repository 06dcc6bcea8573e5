"""Histograms of a Prometheus text: what was observed between two readings of it, as counts and means."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"^ray_(\w+)_(sum|count)\{(.*)\} (\S+)$")
_BUCKET = re.compile(r"^ray_(\w+)_bucket\{(.*)\} (\S+)$")
_TAG = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# What tells a reader what was timed; the rest of Ray's tags say where.
KEPT_TAGS = (
    "deployment",
    "stage",
    "source",
    "kind",
    "method",
    "route",
    "status_code",
    "status",
    "component",
    "loop_type",
)

WANTED = (
    "serve_http_request_latency_ms",
    "serve_deployment_processing_latency_ms",
    "serve_router_args_resolution_latency_ms",
    "serve_request_router_fulfillment_time_ms",
    "serve_event_loop_scheduling_latency_ms",
    "tokenalign_",
)

Key = tuple[str, tuple[tuple[str, str], ...]]
Sums = dict[Key, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Observed:
    """A histogram with its tags: how many values came, and their mean, in ms where they are times."""

    name: str
    tags: dict[str, str]
    count: int
    mean: float
    unit: str

    @property
    def described(self) -> str:
        """Its tags in a line."""
        return ", ".join(f"{key} {value}" for key, value in self.tags.items())


def histogram_sums(text: str, wanted: Iterable[str] = WANTED) -> Sums:
    """Count and sum of every wanted histogram, added up over replicas and processes."""
    wanted = tuple(wanted)
    found: Sums = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is None or not match[1].startswith(wanted):
            continue
        tags = dict(_TAG.findall(match[3]))
        key = (match[1], tuple((tag, tags[tag]) for tag in KEPT_TAGS if tags.get(tag)))
        count, total = found.get(key, (0.0, 0.0))
        value = float(match[4])
        found[key] = (count + value, total) if match[2] == "count" else (count, total + value)
    return found


def observed_between(before: Sums, after: Sums) -> list[Observed]:
    """What came between two readings, by name and tags; histograms without a new value are left out."""
    rows = []
    for (name, tags), (count, total) in after.items():
        earlier_count, earlier_total = before.get((name, tags), (0.0, 0.0))
        if (added := count - earlier_count) <= 0:
            continue
        mean, unit = (total - earlier_total) / added, ""
        if name.endswith("_seconds"):
            mean, unit = 1e3 * mean, "ms"
        elif name.endswith("_ms"):
            unit = "ms"
        rows.append(Observed(name, dict(tags), round(added), mean, unit))
    return sorted(rows, key=lambda row: (row.name, row.described))


def bucket_counts(text: str, name: str, **tags: str) -> dict[float, float]:
    """Of one histogram, upper bound -> how many values are not above it, replicas added up."""
    found: dict[float, float] = {}
    for line in text.splitlines():
        if (match := _BUCKET.match(line)) is None or match[1] != name:
            continue
        given = dict(_TAG.findall(match[2]))
        if tags.items() <= given.items():
            bound = float(given["le"])
            found[bound] = found.get(bound, 0.0) + float(match[3])
    return found


def quantile_bound(before: dict[float, float], after: dict[float, float], share: float) -> float | None:
    """The least bound of a bucket that at least so large a share of the new values are not above; None without any."""
    added = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = max(added.values(), default=0.0)
    return next((bound for bound, count in added.items() if count >= share * total), None) if total > 0 else None
