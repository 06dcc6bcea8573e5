"""Arrivals at four times what the service can do: what happens to those that are admitted, and to the others."""

from dataclasses import dataclass

from tests.benchmarks.bench import Bench, say
from tests.benchmarks.latency import settled
from tests.benchmarks.processes import is_replica
from tests.benchmarks.prometheus import Observed, bucket_counts, observed_between, quantile_bound
from tests.benchmarks.reporting import Target, number, percent, shares_table, table
from tests.benchmarks.served import Load, Served
from tests.benchmarks.statistics_of import median

TITLE = "Overload"
CONNECTIONS = 64
TIMES = 4
MOST_GROWTH = 0.05
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Result:
    """Closed loops of 64 callers, open loops at 0.9 and at 4 times their rate, and Ray's metrics meanwhile.

    refusal_s: seconds from arrival in the ingress that 99 % of the refusals took at most, as exactly as buckets tell
    """

    at_capacity: list[Load]
    below: Load
    over: Load
    observed: list[Observed]
    refusal_s: float | None = None

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return median([load.requests_per_s for load in self.at_capacity])

    @property
    def capacity_p99_ms(self) -> float:
        """Of the callers that hold the service at its capacity."""
        return median([load.p99_ms for load in self.at_capacity])


def growth(samples: list[dict[str, int]], role: str) -> float:
    """How much larger a process is in the last third of a load than in the middle third, relative to that.

    The first third is left out: queues and buffers fill there, and that is not a leak.
    """
    sizes = [sample[role] for sample in samples if role in sample]
    third = len(sizes) // 3
    if third == 0:
        return float("nan")
    return median(sizes[-third:]) / median(sizes[third : 2 * third]) - 1


def measure(bench: Bench) -> Result:
    """Capacity first, then less than that, then four times as much."""
    options, service, texts = bench.options, bench.service, bench.corpus.texts
    extra = {"label_set": service.label_set(bench.corpus.labels)}
    service.load(texts, extra, connections=CONNECTIONS, window_s=2.0)
    say("capacity")
    at_capacity = [
        service.load(texts, extra, connections=CONNECTIONS, window_s=8.0 * options.scale)
        for _ in range(options.repeats)
    ]
    capacity = median([load.requests_per_s for load in at_capacity])
    below = service.load(texts, extra, rate=0.9 * capacity, warm_s=2.0, window_s=10.0 * options.scale, refusals=True)
    before, refusals_before = settled(service), _refusals(service)
    say(f"open loop at {TIMES} times {capacity:.0f} requests/s for {options.overload_s:.0f} s")
    over = service.load(
        texts, extra, rate=TIMES * capacity, warm_s=2.0, window_s=options.overload_s, refusals=True, watch_memory=True
    )
    observed = [row for row in observed_between(before, settled(service)) if row.count]
    refusal_s = quantile_bound(refusals_before, _refusals(service), 0.99)
    service.load(texts, extra, connections=1, window_s=1.0)  # it must answer again as before
    return Result(at_capacity, below, over, observed, refusal_s)


def _refusals(service: Served) -> dict[float, float]:
    return bucket_counts(service.metrics(), "tokenalign_http_request_seconds", status="429")


def targets(result: Result) -> list[Target]:
    """Of the admitted, of the refused, and of the replicas' memory."""
    load = f"open-loop load at {TIMES}x capacity"
    refused = result.over.latency_ms.get("429")
    admitted = result.over.latency_ms.get("200")
    growths = [growth(result.over.memory_bytes, role) for role in result.over.memory_bytes[0] if is_replica(role)]
    return [
        Target(
            f"{load}: admitted p99 / p99 at capacity",
            admitted["p99"] / result.capacity_p99_ms if admitted else None,
            2.0,
            "at most",
            note="" if admitted else "none was admitted",
        ),
        Target(
            f"{load}: time from arrival at the ingress to a 429, p99",
            None if result.refusal_s is None else 1e3 * result.refusal_s,
            50.0,
            "at most",
            "ms",
            note=f"the bound of a bucket; from due, proxy included, p99 {refused['p99']:.0f} ms" if refused else "none",
        ),
        Target(
            f"{load}: growth of the largest grower among the replicas, last third over middle third",
            100 * max(growths),
            100 * MOST_GROWTH,
            "at most",
            "%",
        ),
    ]


def section(result: Result) -> str:
    """Times by status, memory by process, and who used the processors."""
    loads = {
        f"closed, {CONNECTIONS} callers": result.at_capacity[len(result.at_capacity) // 2],
        "open, 0.9 x": result.below,
        f"open, {TIMES} x": result.over,
    }
    times = [["load", "arrivals/s", "status", "share", "p50 ms", "p99 ms", "largest ms"]]
    for name, load in loads.items():
        total = sum(load.statuses.values()) + load.unanswered
        for status, found in load.latency_ms.items():
            share = percent(load.statuses[status] / total)
            arrivals = number(load.rate) if load.rate else "as answered"
            times.append([name, arrivals, status, share, *(number(found[key]) for key in ("p50", "p99", "max"))])
    samples = result.over.memory_bytes
    memory = [["process", "before, MiB", "largest, MiB", "after, MiB", "last third over middle third"]]
    for role in samples[0]:
        sizes = [sample[role] / MIB for sample in samples if role in sample]
        after = percent(growth(samples, role))
        memory.append([role, number(sizes[0]), number(max(sizes)), number(sizes[-1]), after])
    told = [row for row in result.observed if "429" in row.tags.values() or row.name.startswith("tokenalign_")]
    seen = [["histogram", "of", "values", "mean"]]
    seen += [[row.name, row.described, f"{row.count:,}", number(row.mean, row.unit)] for row in told]
    over = result.over
    return "\n\n".join(
        [
            f"Capacity is the throughput of {CONNECTIONS} callers in a closed loop, and p99 at capacity is theirs: an "
            "open loop at that very rate has no steady state. Arrivals of the open loops are independent (exponential "
            "gaps) and drawn beforehand; times count from when a request was due. The generator itself was late by "
            f"{number(over.late_p99_ms)} ms (p99); {over.waited:,} arrivals found no free connection, "
            f"{over.unanswered:,} were never answered.",
            table(times),
            table(memory),
            shares_table({name: [load.shares] for name, load in loads.items()}),
            "What the service says itself of these requests:",
            table(seen) if told else "Nothing: Ray's metrics could not be read.",
        ]
    )


def plots(result: Result) -> dict[str, str]:
    """None."""
    return {}
