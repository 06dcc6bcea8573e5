"""When an answer names no label: because its best score is low, or too near the second best."""

import math
import reprlib
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from tokenalign.config import ModelConfig
from tokenalign.errors import InputError

CALIBRATED: Literal["calibrated"] = "calibrated"
MinScore = float | Literal["calibrated"] | None


class Abstention(TypedDict):
    """Why no label is named: the score, or its lead over the second best, and the limit that it is below."""

    reason: Literal["min_score", "min_margin"]
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a best score must reach to have its label named; None asks for nothing.

    min_score: the score itself; min_margin: its lead over the second best. Build one with `Thresholds.of`.
    calibrated: min_score is still to be the model's own, which `resolved` puts in
    """

    min_score: float | None = None
    min_margin: float | None = None
    calibrated: bool = False

    @classmethod
    def of(cls, min_score: object = None, min_margin: object = None, *, fewest_labels: int = 2) -> "Thresholds":
        """The checked thresholds; `InputError` names the one that is no number from 0 to 1, nor "calibrated".

        fewest_labels: of any label set asked about; a margin needs a second label to be a lead over.
        """
        calibrated = isinstance(min_score, str) and min_score == CALIBRATED
        score = None if calibrated else _fraction(min_score, "min_score", f'"{CALIBRATED}" for the model\'s own, ')
        checked = cls(score, _fraction(min_margin, "min_margin"), calibrated)
        if checked.min_margin is not None and fewest_labels < 2:
            raise InputError(
                "needs a second best score, and there is one label only; use min_score, or give at least 2 labels",
                ("min_margin",),
            )
        return checked

    def resolved(self, config: ModelConfig, *, multi_label: bool) -> "Thresholds":
        """The thresholds with the model's own min_score where that was asked for.

        Raises `InputError` for a model without one, or without one for independent scores.
        """
        if not self.calibrated:
            return self
        fitted = config.abstention
        limit = None if fitted is None else fitted.multi_label_min_score if multi_label else fitted.min_score
        if limit is None:
            raise InputError(
                f"the model {config.name!r} has no calibrated limit{' for independent scores' if multi_label else ''}; "
                "fit one with `tokenalign calibrate FOLDER`, or give a number from 0 to 1",
                ("min_score",),
            )
        return replace(self, min_score=limit, calibrated=False)

    def abstention(self, scores: NDArray[np.floating[Any]]) -> Abstention | None:
        """Why one text's scores `[labels]`, all of them and in any order, name no label; None when they do.

        min_score is looked at first. What is just at a limit has reached it. The thresholds are resolved ones.
        """
        assert not self.calibrated, "resolve the thresholds first"  # noqa: S101  a caller's mistake, not a user's
        best = float(scores.max())
        if self.min_score is not None and best < self.min_score:
            return Abstention(reason="min_score", value=best, limit=self.min_score)
        if self.min_margin is not None:
            margin = best - float(np.partition(scores, -2)[-2])
            if margin < self.min_margin:
                return Abstention(reason="min_margin", value=margin, limit=self.min_margin)
        return None


def _fraction(value: Any, key: str, other: str = "") -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        raise InputError(
            f"must be a number from 0 to 1, {other}or null for no limit; it is {reprlib.repr(value)}", (key,)
        )
    if not 0 <= value <= 1:
        raise InputError(f"is {reprlib.repr(value)}, a score lies from 0 to 1; choose a limit between them", (key,))
    return float(value)
