"""Banking77 and CLINC150 as examples: a message and the name of its intent."""

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokenalign.config import read_json
from tokenalign.errors import DataError

BANKING_DOMAINS = frozenset({"banking", "credit_cards"})
"""The domains of CLINC150 that overlap Banking77: where one is the zero-shot test, the other can't be trained on."""


@dataclass(frozen=True, slots=True)
class Example:
    """A message and its label's name, as the data set writes it."""

    text: str
    label: str

    @property
    def digest(self) -> str:
        """The hex sha256 of text and label, each length-prefixed."""
        parts = (self.text.encode(), self.label.encode())
        return sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()


@dataclass(frozen=True, slots=True)
class Corpus:
    """A data set in its own partitions, in file order.

    labels: the labels' names; examples: partition name -> its examples
    domains: label -> its domain, empty where the data set has none
    """

    labels: tuple[str, ...]
    examples: dict[str, tuple[Example, ...]]
    domains: Mapping[str, str] = field(default_factory=dict)

    def of_labels(self, labels: Collection[str]) -> "Corpus":
        """The data set as if it had those labels alone."""
        wanted = frozenset(labels)
        return Corpus(
            tuple(label for label in self.labels if label in wanted),
            {name: tuple(e for e in part if e.label in wanted) for name, part in self.examples.items()},
            {label: domain for label, domain in self.domains.items() if label in wanted},
        )


def label_words(name: str) -> str:
    """A label's name as words: "card_arrival" is "card arrival"."""
    return name.replace("_", " ")


def normalised(text: str) -> str:
    """The text as duplicates are found by: lower case, white space collapsed."""
    return " ".join(text.lower().split())


def read_banking77(folder: Path) -> Corpus:
    """Banking77 with partitions "train" and "test"; `DataError` says which file or row is at fault."""
    labels = _names(read_json(folder / "categories.json"), folder / "categories.json")
    examples = {name: _read_csv(folder / f"{name}.csv", frozenset(labels)) for name in ("train", "test")}
    return Corpus(labels, examples)


def read_clinc150(folder: Path, domains: Collection[str]) -> Corpus:
    """The intents of some domains of CLINC150, with partitions "train", "val" and "test"; out-of-scope is left out."""
    of_domain = read_clinc150_domains(folder)
    unknown = sorted(set(domains) - of_domain.keys())
    if unknown:
        raise DataError(f"CLINC150 has no domains {unknown}; it has {sorted(of_domain)}")
    domain_of = {label: domain for domain, names in of_domain.items() if domain in domains for label in names}
    path = folder / "data_full.json"
    content = read_json(path)
    examples = {}
    for partition in ("train", "val", "test"):
        rows = content.get(partition) if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise DataError(f"{path} has no list {partition!r}; fetch it again")
        examples[partition] = tuple(Example(str(text), str(label)) for text, label in rows if label in domain_of)
    return Corpus(tuple(domain_of), examples, domain_of)


def read_clinc150_domains(folder: Path) -> dict[str, tuple[str, ...]]:
    """Domain -> the names of its intents, in file order."""
    path = folder / "domains.json"
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} must be an object of domain to intents; fetch it again")
    return {str(domain): _names(names, path) for domain, names in content.items()}


def read_clinc150_out_of_scope(folder: Path) -> tuple[str, ...]:
    """The test queries of CLINC150 that belong to none of its intents."""
    path = folder / "data_full.json"
    content = read_json(path)
    rows = content.get("oos_test") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path} has no list 'oos_test'; fetch it again")
    return tuple(str(text) for text, _ in rows)


def _names(value: Any, path: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise DataError(f"{path} must hold lists of names; fetch it again")
    return tuple(value)


def _read_csv(path: Path, labels: frozenset[str]) -> tuple[Example, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    examples = []
    for number, row in enumerate(rows, start=1):
        text, label = row.get("text"), row.get("category")
        if not text or label not in labels:
            raise DataError(f"{path}, row {number}: needs a text and a category of categories.json, has {row!r}")
        examples.append(Example(text, label))
    return tuple(examples)
