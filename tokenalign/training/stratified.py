"""Texts with labels in four partitions that share no text, each label in the same proportions where that can be."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.errors import DataError
from tokenalign.training.data import normalised
from tokenalign.training.labelled_data import LabelledData, LabelledText, label_matrix
from tokenalign.training.splits import Duplicates, Seen, without_duplicates

TRAIN, VALIDATION, CALIBRATION, TEST = "train", "validation", "calibration", "test"
# Calibration and test as on the Qwen3.5 cards, 56 and 55 of 371; validation, which they have none of, from train.
SHARES = {TRAIN: 0.60, VALIDATION: 0.10, CALIBRATION: 0.15, TEST: 0.15}


@dataclass(frozen=True, slots=True)
class StratifiedSplit:
    """The partitions of one seed, by name, and what was left out of the data and of the test file as duplicates."""

    seed: int
    partitions: Mapping[str, tuple[LabelledText, ...]]
    removed: Mapping[str, Duplicates]


def make_stratified_split(data: LabelledData, seed: int) -> StratifiedSplit:
    """The split of `seed`; the test file is the test partition where there is one.

    A text that stands twice, by case and white space, stays once, in the test file first. Raises `DataError` where a
    partition would be empty or a label would have no text to train on.
    """
    seen = Seen()
    test, test_removed = without_duplicates(data.test or (), seen)
    texts, removed = without_duplicates(data.texts, seen)
    shares = dict(SHARES) if data.test is None else {name: share for name, share in SHARES.items() if name != TEST}
    holds = label_matrix(tuple(texts), data.labels)
    of_text = stratify(holds, list(shares.values()), np.random.default_rng(1_000 + seed))
    partitions = {
        name: tuple(text for text, p in zip(texts, of_text.tolist(), strict=True) if p == i)
        for i, name in enumerate(shares)
    }
    if data.test is not None:
        partitions[TEST] = tuple(test)
    if empty := [name for name, part in partitions.items() if not part]:
        raise DataError(f"{len(texts)} distinct texts leave none for {empty[0]}; give more")
    trained = label_matrix(partitions[TRAIN], data.labels).any(axis=0)
    if not trained.all():
        raise DataError(
            f"label {data.labels[int(np.flatnonzero(~trained)[0])]!r} has no text left to train on; give it more, or "
            "another --seed, or leave it out"
        )
    return StratifiedSplit(seed, partitions, {"data": removed, "test": test_removed})


def stratify(holds: NDArray[np.bool_], shares: Sequence[float], rng: np.random.Generator) -> NDArray[np.int64]:
    """`[texts]` the partition of each text; holds: `[texts, labels]`; shares: wanted sizes, relative to their sum.

    The label with fewest texts left goes first; each of its texts to the partition that wants most of that label, of
    equals the one that wants most texts at all. With one label a text this is plain stratification. Source: iterative
    stratification, Sechidis, Tsoumakas and Vlahavas, 2011, algorithm 1. Texts without a label count as of one more.
    """
    held = np.concatenate([holds, ~holds.any(axis=1, keepdims=True)], axis=1)
    share = np.asarray(shares, dtype=np.float64) / sum(shares)
    wanted_texts = share * len(held)
    wanted = share[:, None] * held.sum(axis=0)  # [partitions, labels]
    of_text = np.full(len(held), -1, dtype=np.int64)
    left = held.sum(axis=0).astype(np.int64)
    while (left > 0).any():
        rarest = int(np.where(left > 0, left, np.iinfo(np.int64).max).argmin())
        for text in rng.permutation(np.flatnonzero(held[:, rarest] & (of_text < 0))).tolist():
            best = int(np.lexsort((-wanted_texts, -wanted[:, rarest]))[0])
            of_text[text] = best
            wanted_texts[best] -= 1
            wanted[best, held[text]] -= 1
            left[held[text]] -= 1
    return of_text


def describe_stratified(split: StratifiedSplit) -> dict[str, Any]:
    """What a head keeps of its split: sizes, one hash per partition, and the leakage check."""
    training = {normalised(text.text) for text in split.partitions[TRAIN]}
    return {
        "seed": split.seed,
        "partitions": {
            name: {"texts": len(part), "sha256": sha256("".join(text.digest for text in part).encode()).hexdigest()}
            for name, part in split.partitions.items()
        },
        "leakage": {
            "duplicates_removed": {name: asdict(found) for name, found in split.removed.items()},
            "shared_with_training": {
                name: len({normalised(text.text) for text in part} & training)
                for name, part in split.partitions.items()
                if name != TRAIN
            },
        },
    }
