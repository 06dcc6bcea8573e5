"""When an answer names no label: because its best score is low, or too near the second best."""

import math
import reprlib
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from tokenalign.errors import InputError


class Abstention(TypedDict):
    """Why no label is named: the score, or its lead over the second best, and the limit that it is below."""

    reason: Literal["min_score", "min_margin"]
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a best score must reach to have its label named; None asks for nothing.

    min_score: the score itself; min_margin: its lead over the second best. Build one with `Thresholds.of`.
    """

    min_score: float | None = None
    min_margin: float | None = None

    @classmethod
    def of(cls, min_score: object = None, min_margin: object = None, *, fewest_labels: int = 2) -> "Thresholds":
        """The checked thresholds; `InputError` names the one that is no number from 0 to 1.

        fewest_labels: of any label set asked about; a margin needs a second label to be a lead over.
        """
        checked = cls(_fraction(min_score, "min_score"), _fraction(min_margin, "min_margin"))
        if checked.min_margin is not None and fewest_labels < 2:
            raise InputError(
                "needs a second best score, and there is one label only; use min_score, or give at least 2 labels",
                ("min_margin",),
            )
        return checked

    def abstention(self, scores: NDArray[np.floating[Any]]) -> Abstention | None:
        """Why one text's scores `[labels]`, all of them and in any order, name no label; None when they do.

        min_score is looked at first. What is just at a limit has reached it.
        """
        best = float(scores.max())
        if self.min_score is not None and best < self.min_score:
            return Abstention(reason="min_score", value=best, limit=self.min_score)
        if self.min_margin is not None:
            margin = best - float(np.partition(scores, -2)[-2])
            if margin < self.min_margin:
                return Abstention(reason="min_margin", value=margin, limit=self.min_margin)
        return None


def _fraction(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise InputError(f"must be a number from 0 to 1, or null for no limit; it is {reprlib.repr(value)}", (key,))
    if not 0 <= value <= 1:
        raise InputError(f"is {reprlib.repr(value)}, a score lies from 0 to 1; choose a limit between them", (key,))
    return float(value)
