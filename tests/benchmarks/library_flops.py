"""How much of the machine's own matrix speed the library turns into useful work."""

from dataclasses import dataclass

from tests.benchmarks.bench import Bench, loaded_library, say
from tests.benchmarks.reporting import Target, number, percent, table
from tests.benchmarks.statistics_of import median, spread

TITLE = "The library against the machine's matrix speed"
DTYPES = ("float32", "bfloat16")
BATCH = 1_024
GIGA = 1e9


@dataclass(frozen=True, slots=True)
class OfDtype:
    """In one dtype: FLOP/s of matrix products by size and texts a second, one for each repeat, measured in turn."""

    threads: int
    gemm: dict[int, list[float]]
    texts_per_s: list[float]
    flop_per_text: float

    def shares(self) -> list[float]:
        """Useful FLOP/s to the best matrix product of all repeats."""
        peak = max(max(speeds) for speeds in self.gemm.values())
        return [rate * self.flop_per_text / peak for rate in self.texts_per_s]


@dataclass(frozen=True, slots=True)
class Result:
    """By dtype; `default` is what the library takes on this machine when it is not told."""

    default: str
    labels: int
    by_dtype: dict[str, OfDtype]


def measure(bench: Bench) -> Result:
    """A process for each dtype; matrix products and texts in turn."""
    labels = bench.corpus.labels
    texts = bench.corpus.texts[: bench.options.library_texts]
    found = {}
    with loaded_library("auto") as library:
        default = str(library.ask("load")["dtype"])
    for dtype in DTYPES:
        say(f"library and matrix products in {dtype}")
        with loaded_library(dtype) as library:
            threads = library.ask("load", dtype=dtype)["threads"]
            library.ask("rate", texts=texts[:256], labels=labels, batch=256)
            gemm: dict[int, list[float]] = {}
            rates = []
            for _ in range(bench.options.repeats):
                for size, speed in library.ask("gemm", dtype=dtype).items():
                    gemm.setdefault(int(size), []).append(speed)
                rates.append(library.ask("rate", texts=texts, labels=labels, batch=BATCH))
            flop = library.ask("flops", texts=texts, labels=labels) / len(texts)
            found[dtype] = OfDtype(threads, gemm, rates, flop)
    return Result(default, len(labels), found)


def targets(result: Result) -> list[Target]:
    """Of the default dtype."""
    shares = result.by_dtype[result.default].shares()
    what = f"in-process library: useful FLOP/s / measured GEMM peak ({result.default}, same threads)"
    return [Target(what, median(shares), 0.55, "at least", spread=spread(shares))]


def section(result: Result) -> str:
    """A row for each dtype."""
    rows = [["dtype", "threads", "GEMM peak, GFLOP/s", "at size", "texts/s", "MFLOP a text", "GFLOP/s", "of the peak"]]
    for dtype, found in result.by_dtype.items():
        speeds = {size: max(values) for size, values in found.gemm.items()}
        size = max(speeds, key=lambda each: speeds[each])
        rate = median(found.texts_per_s)
        rows.append(
            [
                dtype,
                str(found.threads),
                number(speeds[size] / GIGA),
                f"{size:,}",
                number(rate),
                number(found.flop_per_text / 1e6),
                number(rate * found.flop_per_text / GIGA),
                percent(median(found.shares())),
            ]
        )
    return "\n\n".join(
        [
            f"Calls of {BATCH:,} texts against {result.labels} known labels. Useful FLOP are those of the tokens that "
            "the texts have, in encoder, head and MaxSim; padding, norms and softmax count nothing. The peak is the "
            "fastest of all square products, measured between the passes with the same threads.",
            table(rows),
        ]
    )


def plots(result: Result) -> dict[str, str]:
    """None."""
    return {}
