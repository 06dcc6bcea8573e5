"""Throughput of the service against the number of cached labels."""

from dataclasses import dataclass

from tests.benchmarks.bench import Bench, say
from tests.benchmarks.corpus import made_labels
from tests.benchmarks.plots import line_plot
from tests.benchmarks.reporting import Target, number, shares_table, table
from tests.benchmarks.served import Load
from tests.benchmarks.statistics_of import median, paired_ratio, spread

TITLE = "Throughput against labels"
CONNECTIONS = 64
TOP_K = 5
FEW, MANY = 8, 1_024


@dataclass(frozen=True, slots=True)
class Result:
    """Loads by number of labels, one for each repeat."""

    loads: dict[int, list[Load]]


def measure(bench: Bench) -> Result:
    """Label sets of every size in turn, again for each repeat."""
    options, service = bench.options, bench.service
    ids = {count: service.label_set(made_labels(count)) for count in options.label_counts}
    loads: dict[int, list[Load]] = {count: [] for count in ids}
    for repeat in range(options.repeats):
        say(f"repeat {repeat + 1}: {list(ids)} labels")
        for count, set_id in ids.items():
            extra = {"label_set": set_id, "top_k": TOP_K}
            loads[count].append(
                service.load(bench.corpus.texts, extra, connections=CONNECTIONS, window_s=6.0 * options.scale)
            )
    return Result(loads)


def targets(result: Result) -> list[Target]:
    """1,024 labels to 8."""
    rates = {count: [load.requests_per_s for load in loads] for count, loads in result.loads.items()}
    ratios = [many / few for many, few in zip(rates[MANY], rates[FEW], strict=True)]
    what = f"service throughput with {MANY:,} cached labels / with {FEW} (label set id, top_k {TOP_K})"
    return [Target(what, paired_ratio(rates[MANY], rates[FEW]), 0.8, "at least", spread=spread(ratios))]


def section(result: Result) -> str:
    """A table by number of labels, and who used the processors."""
    rows = [["labels", "requests/s", "p50 ms", "p99 ms"]]
    for count, loads in sorted(result.loads.items()):
        values = [[getattr(load, name) for load in loads] for name in ("requests_per_s", "p50_ms", "p99_ms")]
        rows.append([f"{count:,}", *(number(median(value)) for value in values)])
    shares = {f"{count:,} labels": [load.shares for load in loads] for count, loads in sorted(result.loads.items())}
    return "\n\n".join(
        [
            f"{CONNECTIONS} connections, one text a request, labels by label set id, `top_k` {TOP_K}.",
            "![Throughput against labels](labels.svg)",
            table(rows),
            shares_table(shares),
        ]
    )


def plots(result: Result) -> dict[str, str]:
    """Requests a second against labels."""
    points = [(n, median([load.requests_per_s for load in loads])) for n, loads in sorted(result.loads.items())]
    return {"labels.svg": line_plot("Requests a second against labels", "labels", "requests/s", {"service": points})}
