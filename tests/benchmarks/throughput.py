"""Throughput and latency of the service against connections, beside the best of the library in one process."""

from dataclasses import dataclass
from typing import Any

from tests.benchmarks.bench import Bench, say
from tests.benchmarks.plots import line_plot
from tests.benchmarks.processes import GENERATOR
from tests.benchmarks.reporting import Target, number, percent, shares_table, table
from tests.benchmarks.served import Load
from tests.benchmarks.statistics_of import median, spread, without_generator

TITLE = "Throughput and latency against connections"
AT = 64  # connections of the targets
ONE_BY_ID, ONE_IN_BODY, SIXTEEN = "1 text, label set id", "1 text, labels in the body", "16 texts, label set id"
TARGETS = {ONE_BY_ID: 0.85, SIXTEEN: 0.95}
LIBRARY_BATCHES = (32, 128, 1_024)


@dataclass(frozen=True, slots=True)
class Series:
    """Loads of one kind of request: by connections, one for each repeat.

    library: texts a second of the library, measured right before the load at `AT` connections of each repeat
    """

    texts_per_request: int
    library: list[float]
    loads: dict[int, list[Load]]

    def ratios(self, connections: int) -> list[float]:
        """Service to library for each repeat, the load generator's share of the cores taken off."""
        return [
            without_generator(load.texts_per_s, load.shares.of(GENERATOR)) / library
            for load, library in zip(self.loads[connections], self.library, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of this part. library: texts a second by texts per call, one for each repeat."""

    front: str
    labels: int
    library: dict[int, list[float]]
    best_batch: int
    series: dict[str, Series]


def measure(bench: Bench) -> Result:
    """Library and service in turn; each series has a library measurement of its own beside it."""
    options, texts, labels = bench.options, bench.corpus.texts, bench.corpus.labels
    service, library = bench.service, bench.library
    sample = texts[: options.library_texts]
    set_id = service.label_set(labels)
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        ONE_BY_ID: (1, {"label_set": set_id}),
        ONE_IN_BODY: (1, {"labels": labels}),
        SIXTEEN: (16, {"label_set": set_id}),
    }
    for _ in range(2):
        service.load(texts, {"label_set": set_id}, connections=AT, warm_s=1.0, window_s=2.0)
    library.ask("rate", texts=sample[:256], labels=labels, batch=256)
    say("library alone")
    rates = {
        batch: [library.ask("rate", texts=sample, labels=labels, batch=batch) for _ in range(options.repeats)]
        for batch in LIBRARY_BATCHES
    }
    best = max(rates, key=lambda batch: median(rates[batch]))
    found = {name: Series(size, [], {}) for name, (size, _) in kinds.items()}
    for repeat in range(options.repeats):
        for name, (size, extra) in kinds.items():
            counts = [AT, *(n for n in options.connections if n != AT and n * size <= 1_024)]
            say(f"repeat {repeat + 1}: {name}, {counts} connections")
            found[name].library.append(library.ask("rate", texts=sample, labels=labels, batch=best))
            for count in counts:
                warm_s, window_s = (
                    (1.0, 8.0 if count == AT else 4.0) if size == 1 else (5.0, 20.0 if count == AT else 8.0)
                )
                load = service.load(
                    texts,
                    extra,
                    size=size,
                    connections=count,
                    warm_s=warm_s,
                    window_s=window_s * options.scale,
                    refusals=count > AT,  # past `batching.min_open_requests` some are refused
                )
                found[name].loads.setdefault(count, []).append(load)
    return Result(service.front, len(labels), rates, best, found)


def targets(result: Result) -> list[Target]:
    """Ratios at 64 connections."""
    return [
        Target(
            f"service at {AT} connections / library, the load generator's CPU taken off: {name}",
            median(result.series[name].ratios(AT)),
            bound,
            "at least",
            spread=spread(result.series[name].ratios(AT)),
        )
        for name, bound in TARGETS.items()
    ]


def section(result: Result) -> str:
    """Tables of the library, of each series, and of who used the processors."""
    rates = [["texts per call", "texts/s"]]
    rates += [[f"{batch:,}", number(median(values))] for batch, values in result.library.items()]
    parts = [
        f"{result.labels} labels; the proxy in front is {result.front}. The load generator's CPU is taken off by "
        "dividing the service's throughput by 1 less the generator's share of all cores: what the same cores would "
        "give if it ran elsewhere.",
        table(rates),
        "![Throughput](throughput.svg)",
        "![Latency](latency.svg)",
    ]
    for name, series in result.series.items():
        rows = [["connections", "requests/s", "texts/s", "of the library", "p50 ms", "p99 ms", "load generator"]]
        for count in sorted(series.loads):
            loads = series.loads[count]
            rows.append(
                [
                    str(count),
                    number(median([load.requests_per_s for load in loads])),
                    number(median([load.texts_per_s for load in loads])),
                    number(median(series.ratios(count))),
                    number(median([load.p50_ms for load in loads])),
                    number(median([load.p99_ms for load in loads])),
                    percent(median([load.shares.of(GENERATOR) for load in loads])),
                ]
            )
        parts += [f"### {name}", f"The library beside it: {number(median(series.library))} texts/s.", table(rows)]
        parts.append(
            shares_table({f"{n} connections": [load.shares for load in series.loads[n]] for n in sorted(series.loads)})
        )
    return "\n\n".join(parts)


def plots(result: Result) -> dict[str, str]:
    """Texts a second, and times, against connections."""
    rates = {
        name: [(n, median([load.texts_per_s for load in series.loads[n]])) for n in sorted(series.loads)]
        for name, series in result.series.items()
    }
    xs = sorted({x for points in rates.values() for x, _ in points})
    best = median(result.library[result.best_batch])
    rates["library, best"] = [(x, best) for x in (xs[0], xs[-1])]
    one = result.series[ONE_BY_ID]
    times = {
        words: [(n, median([getattr(load, name) for load in one.loads[n]])) for n in sorted(one.loads)]
        for words, name in (("p50", "p50_ms"), ("p99", "p99_ms"))
    }
    return {
        "throughput.svg": line_plot("Texts a second against connections", "connections", "texts/s", rates),
        "latency.svg": line_plot(f"Time of a request, {ONE_BY_ID}", "connections", "ms", times),
    }
