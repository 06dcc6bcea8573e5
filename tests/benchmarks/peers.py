"""The library beside other ways to classify against labels, in turn, with the same threads."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.benchmarks.bench import Bench, loaded_library, say
from tests.benchmarks.children import Child, ChildError
from tests.benchmarks.reporting import Target, number, table
from tests.benchmarks.statistics_of import median, paired_ratio, spread

TITLE = "Peers in one process"
DTYPE = "float32"  # of all of them


@dataclass(frozen=True, slots=True)
class Rival:
    """How a rival is measured: texts of one pass, and the batch sizes of which the fastest counts."""

    what: str
    least: float
    texts: int
    batches: tuple[int, ...]


RIVALS = {
    "sentence-transformers": Rival(
        "sentence-transformers encode + cached cosine, same encoder and threads", 0.85, 1_024, (32, 128, 512)
    ),
    "gliclass": Rival("GLiClass pipeline, random encoder of the same size, all labels in one pass", 20, 16, (1, 8)),
    "nli": Rival(
        "transformers zero-shot-classification, random encoder of the same size, a pass a label", 100, 6, (16, 77)
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compared:
    """Texts a second of the library and of a rival, one for each repeat, or why there are none."""

    package: str = ""
    batch: int = 0
    library: tuple[float, ...] = ()
    rival: tuple[float, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """By rival."""

    labels: int
    threads: int
    by_rival: dict[str, Compared]


def measure(bench: Bench) -> Result:
    """Each rival in a process of its own environment; the library is measured right before each pass of it."""
    with contextlib.ExitStack() as stack:
        found = {}
        library = stack.enter_context(loaded_library(DTYPE))
        threads = int(library.ask("load", dtype=DTYPE)["threads"])
        for name, rival in RIVALS.items():
            try:
                child = stack.enter_context(_loaded(bench, name, threads))
                found[name] = _compared(bench, name, rival, library, child, threads)
            except (ChildError, OSError) as error:
                say(f"{name}: {error}")
                found[name] = Compared(failure=str(error).splitlines()[-1])
    return Result(len(bench.corpus.labels), threads, found)


@contextlib.contextmanager
def _loaded(bench: Bench, name: str, threads: int) -> Iterator[Child]:
    say(f"loading {name}")
    with Child("tests.benchmarks.rivals", bench.options.peers_python) as child:
        yield child


def _compared(bench: Bench, name: str, rival: Rival, library: Child, child: Child, threads: int) -> Compared:
    labels, options = bench.corpus.labels, bench.options
    package = str(child.ask("load", rival=name, threads=threads)["package"])
    draw = random.Random(0)
    count = min(rival.texts, options.library_texts)
    some = draw.sample(bench.corpus.texts, count)
    tried = {batch: child.ask("rate", texts=some, labels=labels, batch=batch) for batch in rival.batches}
    best = max(tried, key=lambda batch: tried[batch])
    ours, theirs = [], []
    for repeat in range(options.repeats):
        say(f"repeat {repeat + 1}: library, {name}")
        texts = draw.sample(bench.corpus.texts, options.library_texts)
        ours.append(library.ask("rate", texts=texts, labels=labels, batch=1_024))
        theirs.append(child.ask("rate", texts=texts[:count], labels=labels, batch=best))
    return Compared(package, best, tuple(ours), tuple(theirs))


def targets(result: Result) -> list[Target]:
    """A ratio for each rival; one that could not be measured says why."""
    found = []
    for name, rival in RIVALS.items():
        each = result.by_rival[name]
        ratios = [a / b for a, b in zip(each.library, each.rival, strict=True)]
        value = paired_ratio(each.library, each.rival) if ratios else None
        what = f"in-process texts/s at {result.labels} labels / {rival.what}"
        found.append(Target(what, value, rival.least, "at least", spread=spread(ratios) if ratios else None))
    return found


def section(result: Result) -> str:
    """A row for each rival."""
    rows = [["rival", "package", "its batch", "texts of a pass", "its texts/s", "library texts/s", "ratio"]]
    for name, rival in RIVALS.items():
        each = result.by_rival[name]
        if each.failure:
            rows.append([rival.what, "", "", "", "", "", f"not measured: {each.failure}"])
            continue
        ratio = paired_ratio(each.library, each.rival)
        rows.append(
            [
                rival.what,
                each.package,
                str(each.batch),
                f"{rival.texts:,}",
                number(median(each.rival)),
                number(median(each.library)),
                number(ratio),
            ]
        )
    return "\n\n".join(
        [
            f"{result.labels} labels, {result.threads} threads, fp32, each in a process of its own, the library right "
            "before the rival in every repeat. Of the rival's batch sizes the fastest counts. Random encoders have "
            "MiniLM's shape (6 layers, width 384); their speed is that of trained ones, their answers mean nothing.",
            table(rows),
        ]
    )


def plots(result: Result) -> dict[str, str]:
    """None."""
    return {}
