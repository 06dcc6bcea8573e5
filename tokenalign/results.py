"""Answers: from logits to scores, best first, and from matches to words of the text."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from tokenalign.abstention import Abstention
from tokenalign.config import ModelConfig, MultiLabelCalibration
from tokenalign.errors import InputError, NumericalError
from tokenalign.labels import LabelSet
from tokenalign.text import TokenizedTexts, Truncation, Windowed
from tokenalign.tokens import IntArray

FloatArray = NDArray[np.float32]
Explain = bool | Literal["all"]


class TruncationReport(TypedDict):
    """Tokens that the text has, tokens that were used, and the code point from which on nothing was seen."""

    tokens: int
    used: int
    cut_at: int


class WindowReport(TypedDict):
    """The windows that a text was read in.

    best: position of the one that carries most of the best label's logit; spans: code points of each, as sent
    """

    count: int
    best: int
    spans: list[list[int]]


class Match(TypedDict):
    """One label token's best match: spans are code points of `description` and of the text as sent.

    description: the wording that the token is of; of a label's several, the one with the largest logit
    """

    label: str
    description: str
    token: str
    label_span: list[int]
    span: list[int]
    text: str
    similarity: float
    contribution: float


class Warning_(TypedDict):  # noqa: N801  `Warning` is Python's own
    """Something the caller should know of a value that was accepted."""

    loc: list[str | int]
    type: str
    message: str


class Classification(TypedDict):
    """The library's answer for one text; `scores` and `logits` map label names, best first.

    label is None where `abstained` says why; score and matches are still those of the best label.
    """

    label: str | None
    score: float
    scores: dict[str, float]
    logits: NotRequired[dict[str, float]]
    abstained: NotRequired[Abstention]
    truncation: TruncationReport | None
    windows: NotRequired[WindowReport]
    matches: NotRequired[list[Match]]
    warnings: list[Warning_]


@dataclass(frozen=True, slots=True, eq=False)
class LabelAlignment:
    """Where the tokens of one label's best description matched in one text.

    description: position among the label set's descriptions
    label_spans: `[m, 2]` of the description's kept tokens; key_index: `[m]` among the text's kept tokens
    similarity, median: `[m]` best and median cosine; contribution: `[m]`, they sum to the label's logit
    """

    description: int
    label_spans: IntArray
    key_index: NDArray[np.int64]
    similarity: FloatArray
    median: FloatArray
    contribution: FloatArray


def softmax(logits: FloatArray) -> FloatArray:
    """Probabilities over the last axis, each row summing to 1; `NumericalError` where a logit is NaN or infinite."""
    _check_finite(logits)
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=-1, keepdims=True)
    return shifted.astype(np.float32)


def independent_scores(logits: FloatArray | NDArray[np.float64], calibration: MultiLabelCalibration) -> FloatArray:
    """sigmoid(scale · logit + bias) of each logit by itself; `NumericalError` where a logit is NaN or infinite.

    Each is the probability that its label holds, whatever else is among the candidates, so they needn't sum to 1.
    """
    _check_finite(logits)
    z = calibration.scale * logits.astype(np.float64) + calibration.bias
    return np.exp(-np.logaddexp(0, -z)).astype(np.float32)


def _check_finite(logits: NDArray[Any]) -> None:
    if not np.isfinite(logits).all():
        raise NumericalError("logits: NaN or infinity; the model or its dtype is at fault")


def label_scores(logits: FloatArray, calibration: MultiLabelCalibration | None) -> FloatArray:
    """Scores of logits `[.., labels]`: independent ones with a calibration, else a softmax over the labels."""
    return softmax(logits) if calibration is None else independent_scores(logits, calibration)


def min_labels(*, return_logits: bool, multi_label: bool) -> int:
    """How many candidates a question needs: two where only a softmax over them is asked for."""
    return 1 if return_logits or multi_label else 2


def check_multi_label(multi_label: object, config: ModelConfig) -> MultiLabelCalibration | None:
    """The model's calibration where independent scores are asked for, else None.

    Raises `InputError` unless `multi_label` is a boolean, and where the model has no calibration for it.
    """
    if not isinstance(multi_label, bool):
        raise InputError(f"must be true or false; it is {reprlib.repr(multi_label)}", ("multi_label",))
    if multi_label and config.multi_label is None:
        raise InputError(
            f"the model {config.name!r} has no calibration for independent scores; fit one with "
            "`tokenalign calibrate FOLDER`, use a model that has one, or leave multi_label out",
            ("multi_label",),
        )
    return config.multi_label if multi_label else None


def ranking(logits: FloatArray, top_k: int | None) -> NDArray[np.intp]:
    """Label positions along the last axis, best first, ties in the caller's order; at most `top_k` of them."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :top_k]


def check_top_k(top_k: int | None) -> None:
    """Raise `InputError` unless `top_k` is None or a positive integer."""
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise InputError(
            f"must be a whole number of at least 1, or null for all labels; it is {reprlib.repr(top_k)}", ("top_k",)
        )


def check_explain(explain: object) -> None:
    """Raise `InputError` unless `explain` is a boolean or "all"."""
    if not isinstance(explain, bool) and explain != "all":
        raise InputError(f'must be true, false or "all"; it is {reprlib.repr(explain)}', ("explain",))


def explained_labels(order: NDArray[np.integer[Any]], explain: Explain) -> list[int]:
    """Which labels' matches are wanted: none, the best one's, or those of all that are returned."""
    if not explain:
        return []
    return [int(i) for i in (order if explain == "all" else order[:1])]


def match_list(
    labels: LabelSet, alignments: Sequence[LabelAlignment], text: str, document_spans: IntArray
) -> list[Match]:
    """The matches as words; `document_spans`: `[kept, 2]` of the text's scored tokens."""
    found: list[Match] = []
    for alignment in alignments:
        description = labels.descriptions[alignment.description]
        name = labels.labels[labels.owners[alignment.description]].name
        for row in range(len(alignment.key_index)):
            label_span = visible_span(description, alignment.label_spans[row])
            span = visible_span(text, document_spans[alignment.key_index[row]])
            found.append(
                Match(
                    label=name,
                    description=description,
                    token=description[slice(*label_span)],
                    label_span=label_span,
                    span=span,
                    text=text[slice(*span)],
                    similarity=float(alignment.similarity[row]),
                    contribution=float(alignment.contribution[row]),
                )
            )
    return found


def visible_span(text: str, span: Sequence[int] | NDArray[Any]) -> list[int]:
    """The span without white space at its ends, which byte-level tokenizers count in; unless it is all of it."""
    start, end = int(span[0]), int(span[1])
    piece = text[start:end]
    lead = len(piece) - len(piece.lstrip())
    trail = len(piece) - len(piece.rstrip())
    return [start + lead, end - trail] if lead + trail < len(piece) else [start, end]


def truncation_report(truncation: Truncation | None) -> TruncationReport | None:
    """The answer's form of a truncation."""
    if truncation is None:
        return None
    return TruncationReport(tokens=truncation.tokens, used=truncation.used, cut_at=truncation.cut_at)


def window_report(windowed: Windowed, text: int, alignment: LabelAlignment) -> WindowReport:
    """The windows of one text; alignment: of its best label, over the scored tokens of all of them.

    The best window is the one whose matches contribute the largest sum, the first of equals; a window without a match
    is never it.
    """
    ends = np.cumsum(windowed.kept_counts(text))
    of_match = np.searchsorted(ends, alignment.key_index, side="right")
    sums = np.bincount(of_match, weights=alignment.contribution, minlength=len(ends))
    sums[np.bincount(of_match, minlength=len(ends)) == 0] = -np.inf
    spans = windowed.window_spans(text).tolist()
    return WindowReport(count=len(spans), best=int(sums.argmax()), spans=spans)


def label_warnings(
    labels: LabelSet, tokenized: TokenizedTexts, loc: Sequence[str | int] = ("labels",)
) -> list[Warning_]:
    """What to tell of label descriptions: cut ones, and ones that the tokenizer makes equal; loc: of the set."""
    found = []
    for i, truncation in enumerate(tokenized.truncations):
        if truncation is not None:
            found.append(
                Warning_(
                    loc=[*loc, labels.owners[i]],
                    type="truncated",
                    message=f"description cut at character {truncation.cut_at}: it has {truncation.tokens} tokens, "
                    f"{truncation.used} were used; shorten it",
                )
            )
    for first, later in tokenized.equal_sequences():
        found.append(
            Warning_(
                loc=[*loc, labels.owners[later]],
                type="indistinguishable",
                message=f"reads the same to the model as label number {labels.owners[first]}: their tokens are equal, "
                "so their scores tie; word one of them differently",
            )
        )
    return found


def classification(
    labels: LabelSet,
    logits: FloatArray,
    scores: FloatArray,
    *,
    top_k: int | None,
    return_logits: bool,
    truncation: Truncation | None,
    matches: list[Match] | None,
    warnings: list[Warning_],
    abstained: Abstention | None = None,
    windows: WindowReport | None = None,
) -> Classification:
    """The library's answer for one text; logits and scores: `[labels]`."""
    order = ranking(logits, top_k).tolist()
    names = labels.names
    answer = Classification(
        label=names[order[0]] if abstained is None else None,
        score=float(scores[order[0]]),
        scores={names[i]: float(scores[i]) for i in order},
        truncation=truncation_report(truncation),
        warnings=warnings,
    )
    if return_logits:
        answer["logits"] = {names[i]: float(logits[i]) for i in order}
    if abstained is not None:
        answer["abstained"] = abstained
    if windows is not None:
        answer["windows"] = windows
    if matches is not None:
        answer["matches"] = matches
    return answer
