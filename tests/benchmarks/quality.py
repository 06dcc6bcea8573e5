"""That speed costs no quality: the same top labels and scores in another dtype, and in the service."""

from dataclasses import dataclass
from typing import Any

from tests.benchmarks.bench import Bench, loaded_library, say
from tests.benchmarks.reporting import Target, number, percent, table
from tests.benchmarks.statistics_of import percentile

TITLE = "Scores of the speed options"
LEAST_UNCHANGED = 0.995
TEXTS_PER_REQUEST = 64

Answers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Answers against those of the library in fp32: equal top labels, and differences of a score (0..1) anywhere."""

    texts: int
    unchanged: float
    largest_drift: float
    p99_drift: float


@dataclass(frozen=True, slots=True)
class Result:
    """By option."""

    labels: int
    by_option: dict[str, Comparison]


def compared(reference: Answers, other: Answers) -> Comparison:
    """How far `other` is from `reference`; both have answers for the same texts and scores in the same order."""
    pairs = list(zip(reference, other, strict=True))
    same = sum(a["label"] == b["label"] for a, b in pairs)
    drifts = [max(abs(x - y) for x, y in zip(a["scores"], b["scores"], strict=True)) for a, b in pairs]
    return Comparison(len(pairs), same / len(pairs), max(drifts), percentile(drifts, 99))


def measure(bench: Bench) -> Result:
    """The library in fp32 and bf16, and the service."""
    labels = bench.corpus.labels
    texts = bench.corpus.texts[: bench.options.quality_texts]
    answers: dict[str, Answers] = {}
    for dtype in ("float32", "bfloat16"):
        say(f"answers of the library in {dtype}")
        with loaded_library(dtype) as library:
            answers[dtype] = library.ask("answers", texts=texts, labels=labels)
    say("answers of the service")
    served = f"service, dtype {bench.dtype}"
    answers[served] = _served(bench, texts, labels)
    reference = answers.pop("float32")
    return Result(len(labels), {name: compared(reference, each) for name, each in answers.items()})


def _served(bench: Bench, texts: list[str], labels: list[str]) -> Answers:
    set_id = bench.service.label_set(labels)
    found = []
    for start in range(0, len(texts), TEXTS_PER_REQUEST):
        body = {"texts": texts[start : start + TEXTS_PER_REQUEST], "label_set": set_id}
        for result in bench.service.request("POST", "/v1/classify", body)["results"]:
            scores = {each["label"]: each["score"] for each in result["scores"]}
            found.append({"label": result["label"], "scores": [scores[label] for label in labels]})
    return found


def targets(result: Result) -> list[Target]:
    """Nearly no top label may change."""
    return [
        Target(
            f"top label unchanged against the library in fp32: {name}",
            100 * each.unchanged,
            100 * LEAST_UNCHANGED,
            "at least",
            "%",
        )
        for name, each in result.by_option.items()
    ]


def section(result: Result) -> str:
    """A row for each option."""
    rows = [["option", "texts", "top label unchanged", "largest drift of a score", "p99 of a text's largest drift"]]
    for name, each in result.by_option.items():
        rows.append(
            [name, f"{each.texts:,}", percent(each.unchanged), number(each.largest_drift), number(each.p99_drift)]
        )
    return f"Against the library in fp32; {result.labels} labels.\n\n" + table(rows)


def plots(result: Result) -> dict[str, str]:
    """None."""
    return {}
