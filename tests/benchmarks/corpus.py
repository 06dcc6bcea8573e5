"""Texts and labels to measure with: Banking77's where the data folder is there, else made from words."""

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[3] / "shared" / "data"

ACTIONS = ("report", "dispute", "cancel", "explain", "track", "change", "verify", "request", "repeat", "confirm")
THINGS = (
    "card payment", "cash withdrawal", "transfer abroad", "direct debit", "account limit", "exchange rate", "fee",
    "standing order", "savings account", "refund", "cheque deposit",
)  # fmt: skip
MATTERS = (
    "that failed", "that is pending", "charged twice", "in another currency", "made by someone else",
    "with a wrong amount", "after a refund", "on a business account", "from a lost phone", "for a joint account",
    "without a receipt", "during travel", "of last month", "that was declined", "with a virtual card",
    "before the due date", "for a new customer", "over the weekend", "at a shop abroad", "in the app",
)  # fmt: skip
OPENINGS = (
    "Hi,",
    "Hello.",
    "Please help me to",
    "I want to",
    "How do I",
    "Can you",
    "Why can't I",
    "Is it possible to",
)
ENDINGS = ("", "today", "It has been a week already.", "I looked in the app and found nothing about it. Thanks!")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Distinct texts, 77 labels for them, and where both are from."""

    source: str
    texts: list[str]
    labels: list[str]


def load_corpus(data: Path = DATA) -> Corpus:
    """Banking77's test messages and categories, or as many made ones."""
    folder = data / "banking77"
    if not folder.is_dir():
        return Corpus("made from words", list(itertools.islice(_made_texts(), 3_080)), made_labels(77))
    with (folder / "test.csv").open(encoding="utf-8") as file:
        texts = list(dict.fromkeys(row["text"] for row in csv.DictReader(file)))
    names = json.loads((folder / "categories.json").read_text(encoding="utf-8"))
    return Corpus("Banking77, test", texts, [name.replace("_", " ") for name in names])


def made_labels(count: int) -> list[str]:
    """Distinct labels of three to eight words; `ValueError` past the number that can be made."""
    combined = (" ".join(words) for words in itertools.product(ACTIONS, THINGS, MATTERS))
    found = list(itertools.islice(combined, count))
    if len(found) < count:
        raise ValueError(f"{count} labels are asked for, {len(found)} can be made")
    return found


def _made_texts() -> Iterator[str]:
    """Distinct messages of 4 to 25 words, lengths mixed."""
    parts = list(itertools.product(ACTIONS, THINGS, MATTERS, OPENINGS, ENDINGS))
    step = 7_919  # a prime that shares nothing with their number, so that neighbours differ in every part
    for i in range(len(parts)):
        action, thing, matter, opening, ending = parts[i * step % len(parts)]
        yield f"{opening} {action} a {thing} {matter} {ending}".strip()
