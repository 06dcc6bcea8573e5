"""The service with an encoder of the released head's size, beside nothing but that encoder's forward passes."""

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.bench import Bench, loaded_library, say
from tests.benchmarks.children import Child
from tests.benchmarks.corpus import DATA
from tests.benchmarks.processes import Shares, shares_between
from tests.benchmarks.reporting import Target, number, shares_table, table
from tests.benchmarks.served import Served, serving, shipped_config
from tests.benchmarks.statistics_of import median, spread

TITLE = "An encoder of Qwen3-1.7B's shape"
DTYPE = "bfloat16"
TEXTS = 64
MAX_BATCH_TOKENS = 4_096  # of serve_config.yaml
FREE_BYTES = 6 * 2**30


@dataclass(frozen=True, slots=True)
class Result:
    """Texts a second of the bare encoder and of the service, one for each repeat, and the processors meanwhile."""

    texts: int
    labels: int
    bare: list[float]
    served: list[float]
    shares: list[Shares]

    def ratios(self) -> list[float]:
        """Service to bare encoder."""
        return [a / b for a, b in zip(self.served, self.bare, strict=True)]


def measure(bench: Bench) -> Result:
    """A folder of random weights for as long as it takes; bare passes and requests of the same texts in turn."""
    tokenizer = DATA / "qwen3-tokenizer"
    if not tokenizer.is_dir():
        raise FileNotFoundError(f"{tokenizer} is absent, and this part needs Qwen3's tokenizer")
    bench.stop_service()
    folder = Path(tempfile.mkdtemp(prefix="bench-qwen3-"))
    try:
        if shutil.disk_usage(folder).free < FREE_BYTES:
            raise OSError(f"{folder} has less than {FREE_BYTES / 2**30:.0f} GiB free; set TMPDIR to a larger disk")
        say("writing random weights")
        with Child("tests.benchmarks.random_qwen3") as child:
            head = child.ask("build", folder=str(folder), tokenizer=str(tokenizer))["head"]
        return _measured(bench, head)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measured(bench: Bench, head: str) -> Result:
    labels, texts = bench.corpus.labels, bench.corpus.texts
    bare, served, shares = [], [], []
    config = shipped_config(model={"id_or_path": head, "dtype": DTYPE, "device": "cpu"})
    say("starting the service and the library with it")
    with serving(config, bench.options.front) as service, loaded_library(DTYPE, head) as library:
        set_id = service.label_set(labels)
        service.request("POST", "/v1/classify", {"texts": texts[-8:], "label_set": set_id})
        library.ask("bare_rate", texts=texts[-8:], max_batch_tokens=MAX_BATCH_TOKENS)  # weights come from disk here
        for repeat in range(bench.options.repeats):
            say(f"repeat {repeat + 1}: {TEXTS} texts")
            chosen = texts[repeat * TEXTS : (repeat + 1) * TEXTS]
            bare.append(library.ask("bare_rate", texts=chosen, max_batch_tokens=MAX_BATCH_TOKENS))
            rate, used = _request(service, {"texts": chosen, "label_set": set_id})
            served.append(rate)
            shares.append(used)
    return Result(TEXTS, len(labels), bare, served, shares)


def _request(service: Served, body: dict[str, object]) -> tuple[float, Shares]:
    before, started = service.processes.cpu_times(), time.perf_counter()
    service.request("POST", "/v1/classify", body)
    elapsed = time.perf_counter() - started
    after = service.processes.cpu_times()
    used = shares_between(before, after, service.processes.roles, elapsed, psutil.cpu_count() or 1, 0.0)
    return TEXTS / elapsed, used


def targets(result: Result) -> list[Target]:
    """Nine tenths of what the encoder alone does."""
    what = "Qwen3-1.7B shape, random weights, bf16: service / bare batched forward"
    return [Target(what, median(result.ratios()), 0.9, "at least", spread=spread(result.ratios()))]


def section(result: Result) -> str:
    """Both rates, and who used the processors."""
    rows = [["", "texts/s"], ["bare batched forward", number(median(result.bare))]]
    rows.append(["service", number(median(result.served))])
    return "\n\n".join(
        [
            f"Random weights in bf16 (3.4 GB), the real tokenizer. Requests of {result.texts} texts, one at a time, "
            f"{result.labels} cached labels; the bare encoder gets the same texts, tokenised beforehand, in batches of "
            f"similar length of at most {MAX_BATCH_TOKENS:,} padded tokens, in a process of its own.",
            table(rows),
            shares_table({"one request at a time": result.shares}),
        ]
    )


def plots(result: Result) -> dict[str, str]:
    """None."""
    return {}
