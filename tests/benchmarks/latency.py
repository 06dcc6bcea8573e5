"""What a single caller waits for: the service's time of one text less the library's, and where it goes."""

import time
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.bench import Bench, say
from tests.benchmarks.plots import stacked_bars
from tests.benchmarks.prometheus import Observed, Sums, histogram_sums, observed_between
from tests.benchmarks.reporting import Target, number, shares_table, table
from tests.benchmarks.served import Front, Load, Served, serving, shipped_config
from tests.benchmarks.statistics_of import median, spread

TITLE = "Time budget of a single caller"
MOST_MS = 10.0
SINGLES = 200
SETTLED_S, SETTLE_LIMIT_S = 12.0, 45.0  # Ray's metrics arrive every ten seconds
RESTLESS = "serve_event_loop"  # grows without requests


@dataclass(frozen=True, slots=True)
class Floor:
    """An application that computes nothing: p50 of one caller for each repeat, and requests a second of 64."""

    p50_ms: list[float]
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """In-process and served times for each repeat, floors by front and application, and what Ray's metrics say."""

    front: str
    in_process_ms: list[float]
    loads: list[Load]
    observed: list[Observed]
    floors: dict[str, dict[str, Floor]]

    def added_ms(self) -> list[float]:
        """What the service adds to the library's time, for each repeat."""
        return [load.p50_ms - inside for load, inside in zip(self.loads, self.in_process_ms, strict=True)]

    def budget_ms(self) -> dict[str, float]:
        """The p50 of one caller in parts that add up to it."""
        floors = self.floors.get(self.front, {})
        empty = median(floors["alone"].p50_ms) if "alone" in floors else 0.0
        hops = median(floors["chain"].p50_ms) - empty if "chain" in floors else 0.0
        inside = median(self.in_process_ms)
        rest = median([load.p50_ms for load in self.loads]) - empty - hops - inside
        return {
            "proxy and an empty ingress": empty,
            "two more deployments, empty": hops,
            "the library's own time": inside,
            "the rest": rest,
        }


def measure(bench: Bench) -> Result:
    """Service and library in turn; then, with the service ended, the empty applications behind each proxy."""
    texts, labels, options = bench.corpus.texts, bench.corpus.labels, bench.options
    service = bench.service
    front = service.front
    extra = {"label_set": service.label_set(labels)}
    service.load(texts, extra, connections=1, window_s=2.0)
    before = settled(service)
    inside, loads = [], []
    for repeat in range(options.repeats):
        say(f"repeat {repeat + 1}: one caller")
        times = bench.library.ask("singles", texts=texts[repeat * SINGLES : (repeat + 1) * SINGLES], labels=labels)
        inside.append(1e3 * median(times))
        loads.append(service.load(texts, extra, connections=1, window_s=6.0 * options.scale))
    observed = observed_between(before, settled(service))
    bench.stop_service()
    fronts: tuple[Front, ...] = ("python", "haproxy")
    return Result(front, inside, loads, observed, {kind: _floors(bench, kind) for kind in fronts})


def settled(service: Served) -> Sums:
    """Ray's histograms once all of the past has arrived in them."""
    last: Sums = {}
    started = since = time.monotonic()
    while time.monotonic() - since < SETTLED_S and time.monotonic() - started < SETTLE_LIMIT_S:
        time.sleep(1.0)
        now = histogram_sums(service.metrics())
        if _at_rest(now) != _at_rest(last):
            last, since = now, time.monotonic()
    return histogram_sums(service.metrics())


def _at_rest(sums: Sums) -> Sums:
    return {key: value for key, value in sums.items() if not key[0].startswith(RESTLESS)}


def _floors(bench: Bench, front: Front) -> dict[str, Floor]:
    say(f"empty applications, {front} proxy")
    config = shipped_config()
    config["applications"] = [
        _application("alone", "/"),
        _application("chain", "/chain"),
    ]
    extra: dict[str, Any] = {"label_set": "0" * 64}
    scale = bench.options.scale
    times: dict[str, list[float]] = {"alone": [], "chain": []}
    rates = {}
    with serving(config, front) as served:
        served.wait_until_ready("/chain/health/ready")
        paths = {"alone": "/v1/classify", "chain": "/chain/v1/classify"}
        for _ in range(bench.options.repeats):
            for name, path in paths.items():
                load = served.load(bench.corpus.texts, extra, path=path, connections=1, window_s=3.0 * scale)
                times[name].append(load.p50_ms)
        for name, path in paths.items():
            load = served.load(bench.corpus.texts, extra, path=path, connections=64, window_s=3.0 * scale)
            rates[name] = load.requests_per_s
    return {name: Floor(times[name], rates[name]) for name in times}


def _application(name: str, prefix: str) -> dict[str, Any]:
    return {"name": name, "route_prefix": prefix, "import_path": f"tests.benchmarks.noop:{name}"}


def targets(result: Result) -> list[Target]:
    """At most 10 ms more than the library."""
    added = result.added_ms()
    what = "p50 at 1 connection minus in-process time of one text"
    return [Target(what, median(added), MOST_MS, "at most", "ms", spread=spread(added))]


def section(result: Result) -> str:
    """The budget, the floors, and the means of every timing that Serve and the application export."""
    p50 = median([load.p50_ms for load in result.loads])
    budget = [["where", "ms"], *([name, number(ms)] for name, ms in result.budget_ms().items())]
    floors = [["proxy", "application", "p50 of one caller, ms", "requests/s of 64 callers"]]
    for front, apps in result.floors.items():
        floors += [[front, name, number(median(f.p50_ms)), number(f.requests_per_s)] for name, f in apps.items()]
    seen = [["histogram", "of", "values", "mean"]]
    seen += [[row.name, row.described, f"{row.count:,}", number(row.mean, row.unit)] for row in result.observed]
    return "\n\n".join(
        [
            f"One caller, one text, {result.front} in front: p50 {number(p50)} ms; the library in one process takes "
            f"{number(median(result.in_process_ms))} ms. The empty applications were measured in the same run: an "
            "ingress that answers at once, and one that passes small arrays through two more deployments. The rest is "
            "what neither has: a real body and answer, batching, larger arrays, and computing beside other processes.",
            "![Time budget](budget.svg)",
            table(budget),
            shares_table({"one caller": [load.shares for load in result.loads]}),
            "### Empty applications",
            table(floors),
            "### Means of what Serve and the application time themselves",
            "Of the same requests; one stage may lie within another.",
            table(seen) if result.observed else "Ray's metrics could not be read.",
        ]
    )


def plots(result: Result) -> dict[str, str]:
    """Bars of the budget and of both floors."""
    bars: dict[str, dict[str, float]] = {f"service, {result.front}": result.budget_ms()}
    for front, apps in result.floors.items():
        empty = median(apps["alone"].p50_ms)
        bars[f"empty, {front}"] = {
            "proxy and an empty ingress": empty,
            "two more deployments, empty": median(apps["chain"].p50_ms) - empty,
        }
    bars["library"] = {"the library's own time": median(result.in_process_ms)}
    return {"budget.svg": stacked_bars("Where the time of one text goes, one caller", "ms", bars)}
