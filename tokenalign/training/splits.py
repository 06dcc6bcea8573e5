"""Which labels and messages train, select, calibrate and test a head, without shared texts.

Labels are disjoint, so that a head is tested on labels that it never saw; or, for a head that is only ever asked about
the labels that it was trained on, messages are.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from tokenalign.errors import DataError
from tokenalign.training.data import Corpus, Example, label_words, normalised

SplitKind = Literal["labels", "messages"]
HELD_OUT = ("test", "validation_select", "validation_calibrate")
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.2
MIN_LABELS = 6  # two each to train, to validate and to test: one label alone can't be told apart from another
MIN_MESSAGES = 5  # of a label: two to train on, one each to select, to calibrate and to test


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Examples left out because their text stood before in the same partition, or in one named before it.

    exact: with that very text; normalised: with one that differs by case and white space alone
    other_label: those of them whose label differs as well
    """

    exact: int = 0
    normalised: int = 0
    other_label: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.exact + self.normalised


@dataclass(frozen=True, slots=True)
class Split:
    """The partitions of one seed.

    train_labels, validation_labels, test_labels: disjoint where `kind` is "labels", else all labels each
    partitions: name -> examples. "test" holds the source's whole test file, so seen and unseen labels; the two
        validation partitions share labels and no message; "train" holds Banking77, "train_extra" other sources
    removed: name -> what was left out of it as a duplicate
    """

    seed: int
    train_labels: tuple[str, ...]
    validation_labels: tuple[str, ...]
    test_labels: tuple[str, ...]
    partitions: Mapping[str, tuple[Example, ...]]
    removed: Mapping[str, Duplicates]
    kind: SplitKind = "labels"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label of the source, sorted."""
        return tuple(sorted({*self.train_labels, *self.validation_labels, *self.test_labels}))

    @property
    def unseen_test(self) -> tuple[Example, ...]:
        """The test messages of the test labels."""
        return tuple(_of_labels(self.partitions["test"], self.test_labels))

    @property
    def seen_test(self) -> tuple[Example, ...]:
        """The test messages of the labels that were trained on."""
        return tuple(_of_labels(self.partitions["test"], self.train_labels))


def split_labels(labels: Collection[str], seed: int, sizes: tuple[int, int, int]) -> tuple[tuple[str, ...], ...]:
    """Disjoint random groups of labels for training, validation and test, of the given sizes."""
    if sum(sizes) != len(labels) or min(sizes) < 2:
        raise DataError(
            f"label groups of {sizes} don't divide the data set's {len(labels)} labels; each group needs at least 2, "
            "and together they are all of them"
        )
    names = sorted(labels)
    shuffled = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    ends = np.cumsum(sizes)
    return tuple(tuple(shuffled[end - size : end]) for end, size in zip(ends, sizes, strict=True))


def make_split(banking77: Corpus, seed: int, sizes: tuple[int, int, int], extra: Corpus | None = None) -> Split:
    """The split of `seed`, with `extra`'s training messages beside Banking77's.

    A text that stands in several partitions, by case and white space, stays in the first of test, validation, train.
    Labels of `extra` that read like a validation or test label are left out, with their messages.
    """
    train_labels, validation_labels, test_labels = split_labels(banking77.labels, seed, sizes)
    rng = np.random.default_rng(1_000 + seed)
    seen = Seen()
    test, test_removed = without_duplicates(banking77.examples["test"], seen)
    validation, validation_removed = without_duplicates(
        _of_labels(banking77.examples["train"], validation_labels), seen
    )
    train, train_removed = without_duplicates(_of_labels(banking77.examples["train"], train_labels), seen)
    validation = [validation[i] for i in rng.permutation(len(validation))]
    train = [train[i] for i in rng.permutation(len(train))]
    middle = len(validation) // 2
    partitions = {
        "test": tuple(test),
        "validation_select": tuple(validation[:middle]),
        "validation_calibrate": tuple(validation[middle:]),
        "train": tuple(train),
    }
    removed = {"test": test_removed, "validation": validation_removed, "train": train_removed}
    if extra is not None:
        held_out = {normalised(label_words(name)) for name in (*validation_labels, *test_labels)}
        usable = [label for label in extra.labels if normalised(label_words(label)) not in held_out]
        examples, removed["train_extra"] = without_duplicates(_of_labels(extra.examples["train"], usable), seen)
        partitions["train_extra"] = tuple(examples)
    split = Split(seed, train_labels, validation_labels, test_labels, partitions, removed)
    if any(shared := shared_texts(split).values()):
        raise DataError(f"training messages stand in held-out partitions: {shared}; the split is unusable")
    return split


def make_message_split(corpus: Corpus, seed: int) -> Split:
    """The split of `seed` in which every label trains, validates and is tested, each time with other messages.

    The corpus' own "test" partition is the test where there is one; else a fifth of each label's messages are. A fifth
    of the others select and calibrate. Raises `DataError` for labels with too few messages.
    """
    seen = Seen()
    test, test_removed = without_duplicates(corpus.examples.get("test", ()), seen)
    rest, removed = without_duplicates(corpus.examples["train"], seen)
    rng = np.random.default_rng(1_000 + seed)
    parts: dict[str, list[Example]] = {"test": test, "validation_select": [], "validation_calibrate": [], "train": []}
    own_test = "test" in corpus.examples
    for label, examples in by_label(rest, corpus.labels).items():
        if len(examples) < MIN_MESSAGES:
            raise DataError(
                f"label {label!r} has {len(examples)} distinct message{'' if len(examples) == 1 else 's'}"
                f"{' outside of the test file' if own_test else ''}, at least {MIN_MESSAGES} are needed to train, "
                "validate and test on different ones; add some, or leave the label out"
            )
        shuffled = [examples[i] for i in rng.permutation(len(examples))]
        tested = 0 if own_test else max(1, round(len(shuffled) * TEST_SHARE))
        validated = max(2, round((len(shuffled) - tested) * VALIDATION_SHARE))
        parts["test"] += shuffled[:tested]
        parts["validation_select"] += shuffled[tested : tested + validated // 2]
        parts["validation_calibrate"] += shuffled[tested + validated // 2 : tested + validated]
        parts["train"] += shuffled[tested + validated :]
    partitions = {name: tuple(examples) for name, examples in parts.items()}
    duplicates = {"test": test_removed, "train": removed}
    labels = tuple(sorted(corpus.labels))
    return Split(seed, labels, labels, labels, partitions, duplicates, "messages")


def make_label_split(corpus: Corpus, seed: int) -> Split:
    """The split of `seed` of any corpus in the proportions of Banking77's: 50, 12 and 15 labels of 77.

    The corpus' own "test" partition is the test where there is one; else it is all messages of the test labels, and a
    fifth of each other label's. Raises `DataError` for too few labels or messages.
    """
    count = len(corpus.labels)
    if count < MIN_LABELS:
        raise DataError(
            f"{count} labels can't be divided into disjoint ones for training, validation and test, which takes "
            f"{MIN_LABELS}; train on messages of every label instead (--split messages), or add labels"
        )
    validation, test = max(2, round(count * 12 / 77)), max(2, round(count * 15 / 77))
    sizes = (count - validation - test, validation, test)
    if "test" not in corpus.examples:
        test_labels = frozenset(split_labels(corpus.labels, seed, sizes)[2])
        rng = np.random.default_rng(2_000 + seed)
        tested: set[int] = set()
        for label, rows in _rows_by_label(corpus.examples["train"]).items():
            drawn = rng.permutation(rows)[: round(len(rows) * TEST_SHARE)]
            tested |= set(rows if label in test_labels else drawn.tolist())
        examples = corpus.examples["train"]
        corpus = Corpus(
            corpus.labels,
            {
                "train": tuple(example for i, example in enumerate(examples) if i not in tested),
                "test": tuple(example for i, example in enumerate(examples) if i in tested),
            },
        )
    split = make_split(corpus, seed, sizes)
    for name, labels in (("train", split.train_labels), ("validation", split.validation_labels)):
        parts = [name] if name == "train" else [f"validation_{part}" for part in ("select", "calibrate")]
        present = {example.label for part in parts for example in split.partitions[part]}
        if missing := [label for label in labels if label not in present]:
            raise DataError(
                f"label {missing[0]!r} has no message left for {name}; give it more, or another --seed, or leave it out"
            )
    return split


def shared_texts(split: Split) -> dict[str, int]:
    """For each held-out partition, how many of its normalised texts stand in a training partition too."""
    train = {
        normalised(example.text)
        for name, examples in split.partitions.items()
        if name not in HELD_OUT
        for example in examples
    }
    return {name: len({normalised(e.text) for e in split.partitions[name]} & train) for name in HELD_OUT}


def partition_hashes(split: Split) -> dict[str, list[str]]:
    """Partition -> the sha256 of each of its examples, in order."""
    return {name: [example.digest for example in examples] for name, examples in split.partitions.items()}


def describe(split: Split) -> dict[str, Any]:
    """What a trained head keeps of its split: labels, sizes, one hash per partition, and the leakage check."""
    return {
        "kind": split.kind,
        "seed": split.seed,
        "train_labels": list(split.train_labels),
        "validation_labels": list(split.validation_labels),
        "test_labels": list(split.test_labels),
        "partitions": {
            name: {"examples": len(hashes), "sha256": sha256("".join(hashes).encode()).hexdigest()}
            for name, hashes in partition_hashes(split).items()
        },
        "leakage": {
            "duplicates_removed": {name: duplicates.total for name, duplicates in split.removed.items()},
            "of_them": {name: asdict(duplicates) for name, duplicates in split.removed.items()},
            "shared_with_training": shared_texts(split),
        },
    }


def _of_labels(examples: Iterable[Example], labels: Sequence[str]) -> list[Example]:
    wanted = frozenset(labels)
    return [example for example in examples if example.label in wanted]


def by_label(examples: Iterable[Example], labels: Iterable[str]) -> dict[str, list[Example]]:
    """Label -> its examples, in order, for each of `labels`."""
    found: dict[str, list[Example]] = {label: [] for label in labels}
    for example in examples:
        found[example.label].append(example)
    return found


def _rows_by_label(examples: Sequence[Example]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for i, example in enumerate(examples):
        rows.setdefault(example.label, []).append(i)
    return rows


class Told(Protocol):
    """A text, and what names its label or labels."""

    @property
    def text(self) -> str:
        """The text."""

    @property
    def label(self) -> str:
        """Equal where the labels are."""


ToldT = TypeVar("ToldT", bound=Told)


@dataclass(slots=True)
class Seen:
    """What was met: texts as they stand, and normalised text -> the label that it was first met with."""

    texts: set[str] = field(default_factory=set)
    labels: dict[str, str] = field(default_factory=dict)


def without_duplicates(examples: Sequence[ToldT], seen: Seen) -> tuple[list[ToldT], Duplicates]:
    """(examples whose normalised text is new, what the others were); `seen` learns the new ones."""
    kept = []
    exact = normal = other_label = 0
    for example in examples:
        key = normalised(example.text)
        if key not in seen.labels:
            seen.labels[key] = example.label
            kept.append(example)
        else:
            known = example.text in seen.texts
            exact, normal = exact + known, normal + (not known)
            other_label += seen.labels[key] != example.label
        seen.texts.add(example.text)
    return kept, Duplicates(exact, normal, other_label)
