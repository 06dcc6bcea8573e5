"""Which labels and messages train, select, calibrate and test a head: disjoint by label, without shared texts."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from tokenalign.errors import DataError
from tokenalign.training.data import Corpus, Example, label_words, normalised

HELD_OUT = ("test", "validation_select", "validation_calibrate")


@dataclass(frozen=True, slots=True)
class Split:
    """The partitions of one seed.

    train_labels, validation_labels, test_labels: Banking77's labels, disjoint
    partitions: name -> examples. "test" holds the source's whole test file, so seen and unseen labels; the two
        validation partitions share labels and no message; "train" holds Banking77, "train_extra" other sources
    removed: name -> examples left out because their normalised text stood in it before, or in one named before it
    """

    seed: int
    train_labels: tuple[str, ...]
    validation_labels: tuple[str, ...]
    test_labels: tuple[str, ...]
    partitions: Mapping[str, tuple[Example, ...]]
    removed: Mapping[str, int]

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label of the source, sorted."""
        return tuple(sorted((*self.train_labels, *self.validation_labels, *self.test_labels)))

    @property
    def unseen_test(self) -> tuple[Example, ...]:
        """The test messages of the test labels."""
        wanted = frozenset(self.test_labels)
        return tuple(example for example in self.partitions["test"] if example.label in wanted)


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
    seen: set[str] = set()
    test, test_removed = _without_duplicates(banking77.examples["test"], seen)
    validation, validation_removed = _without_duplicates(
        _of_labels(banking77.examples["train"], validation_labels), seen
    )
    train, train_removed = _without_duplicates(_of_labels(banking77.examples["train"], train_labels), seen)
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
        examples, removed["train_extra"] = _without_duplicates(_of_labels(extra.examples["train"], usable), seen)
        partitions["train_extra"] = tuple(examples)
    split = Split(seed, train_labels, validation_labels, test_labels, partitions, removed)
    if any(shared := shared_texts(split).values()):
        raise DataError(f"training messages stand in held-out partitions: {shared}; the split is unusable")
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
        "seed": split.seed,
        "train_labels": list(split.train_labels),
        "validation_labels": list(split.validation_labels),
        "test_labels": list(split.test_labels),
        "partitions": {
            name: {"examples": len(hashes), "sha256": sha256("".join(hashes).encode()).hexdigest()}
            for name, hashes in partition_hashes(split).items()
        },
        "leakage": {"duplicates_removed": dict(split.removed), "shared_with_training": shared_texts(split)},
    }


def _of_labels(examples: Iterable[Example], labels: Sequence[str]) -> list[Example]:
    wanted = frozenset(labels)
    return [example for example in examples if example.label in wanted]


def _without_duplicates(examples: Sequence[Example], seen: set[str]) -> tuple[list[Example], int]:
    """(examples whose normalised text is new, how many were not); `seen` learns the new ones."""
    kept = []
    for example in examples:
        key = normalised(example.text)
        if key not in seen:
            seen.add(key)
            kept.append(example)
    return kept, len(examples) - len(kept)
