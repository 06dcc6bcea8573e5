"""What is worth telling of a label set before anybody relies on it: labels that the model will hardly tell apart.

Two descriptions of different labels are *near-duplicates* when either holds:

- they are the same text but for case, white space and punctuation, which the model hardly sees;
- their representations are alike: each token's best cosine among the tokens of the other label, averaged, taken in both
  directions, of which the smaller counts. It is the score's own measure (MaxSim) between two labels: at 1, each token
  of one has its equal in the other, so whatever a text matches in one it matches in the other.

0.9 was found on the shipped head. Among the 77 labels of Banking77 the closest pair has 0.88; among the 150 of CLINC150
one pair is above 0.9, "schedule meeting" and "meeting schedule". "card payment" and "card payments" have 0.98, "lost
card" and "stolen card" 0.80.
"""

import unicodedata
from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from deploy.label_cache.codec import LabelRows
from tokenalign.labels import LabelSet
from tokenalign.results import Warning_
from tokenalign.tokens import offsets_of

MAX_COMPARED = 8_192
"""Descriptions that are compared with each other, which takes seconds at this number and grows with its square."""

_NEIGHBOURS = 8  # of each description by mean vector, which are then compared token by token
_BLOCK = 512

FloatMatrix = NDArray[np.float32]


def near_duplicates(labels: LabelSet, rows: LabelRows, threshold: float, known: Collection[int] = ()) -> list[Warning_]:
    """A warning for each label that is a near-duplicate of one before it, naming the nearest, in the labels' order.

    rows: of the set's descriptions, in its order; threshold: the similarity from which on two count as near
    known: positions of labels of which as much was told already
    """
    nearest: dict[int, tuple[float, int, int]] = {}
    for similarity, first, later in (*_same_text(labels), *_similar(labels, rows, threshold)):
        owner = labels.owners[later]
        if owner not in known:
            nearest[owner] = max(nearest.get(owner, (0.0, 0, 0)), (similarity, -first, later))
    found = [_warning(labels, -first, later, s) for _, (s, first, later) in sorted(nearest.items())]
    if len(rows) > MAX_COMPARED:
        message = (
            f"{len(rows):,} descriptions are too many to compare all of them, at most {MAX_COMPARED:,} are; only those "
            "with the same words were looked for"
        )
        found.append(Warning_(loc=["labels"], type="not_compared", message=message))
    return found


def similarity(first: FloatMatrix, later: FloatMatrix) -> float:
    """The smaller of the mean best cosines in both directions; `[tokens, width]` unit rows each."""
    cosines = first @ later.T
    return float(min(cosines.max(axis=1).mean(), cosines.max(axis=0).mean()))


def normalised(text: str) -> str:
    """The text without case, white space and punctuation; the text itself where nothing else is in it."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    bare = "".join(c for c in folded if not c.isspace() and not unicodedata.category(c).startswith("P"))
    return bare or text


def _same_text(labels: LabelSet) -> Iterator[tuple[float, int, int]]:
    """(1, first, later) for descriptions of different labels with the same normalised text."""
    firsts: dict[str, int] = {}
    for i, description in enumerate(labels.descriptions):
        first = firsts.setdefault(normalised(description), i)
        if labels.owners[first] != labels.owners[i]:
            yield 1.0, first, i


def _similar(labels: LabelSet, rows: LabelRows, threshold: float) -> Iterator[tuple[float, int, int]]:
    """(similarity, first, later) for descriptions of different labels that reach the threshold.

    Compared token by token are those whose mean vectors are nearest, since all pairs of tokens would take minutes.
    """
    if len(rows) > MAX_COMPARED:
        return
    parts = [part.values.astype(np.float32) for part in rows.split()]
    for later, firsts in enumerate(_neighbours(rows, np.asarray(labels.owners))):
        for first in firsts:
            found = similarity(parts[first], parts[later])
            if found >= threshold:
                yield found, first, later


def _neighbours(rows: LabelRows, owners: NDArray[np.int64]) -> Iterator[list[int]]:
    """For each description those before it, of other labels, whose mean vectors are nearest to its own."""
    sums = np.add.reduceat(rows.values.astype(np.float32), offsets_of(rows.lengths)[:-1], axis=0)
    means = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    for start in range(0, len(means), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(means)))
        others = np.arange(block[-1] + 1)
        cosines = means[block] @ means[others].T
        allowed = (others < block[:, None]) & (owners[others] != owners[block][:, None])
        cosines[~allowed] = -2
        count = min(_NEIGHBOURS, len(others))
        best = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
        for row, columns in enumerate(best):
            yield [int(column) for column in columns if allowed[row, column]]


def _warning(labels: LabelSet, first: int, later: int, found: float) -> Warning_:
    one, other = labels.descriptions[later], labels.descriptions[first]
    if normalised(one) == normalised(other):
        alike = "they differ in case, white space or punctuation alone"
    else:
        alike = f"their representations have similarity {found:.2f} of at most 1"
    return Warning_(
        loc=["labels", labels.owners[later]],
        type="near_duplicate",
        message=f"{_shorten(one)} is hardly told apart from {_shorten(other)} of label number {labels.owners[first]}: "
        f"{alike}, so their scores will lie close together; merge the two labels, or word one of them differently",
    )


def _shorten(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
