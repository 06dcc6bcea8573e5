"""What comes back: answers of the service as the library's own types."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypedDict, cast

from tokenalign.client.errors import InvalidAnswerError, moved_loc
from tokenalign.client.requests import Part, Question
from tokenalign.errors import FingerprintMismatchError, InputError
from tokenalign.labels import LabelSet
from tokenalign.results import Classification, Warning_


class ModelIdentity(TypedDict):
    """Which model gave a score; the fingerprint changes with anything that a score depends on."""

    name: str
    fingerprint: str


class ModelInfo(ModelIdentity):
    """What is served. `limits` are those of one request."""

    backbone: dict[str, Any]
    max_length: int
    document_template: str
    label_template: str
    limits: dict[str, int]


class Usage(TypedDict):
    """Tokens of the texts, label descriptions of the request, and how many of those were not encoded anew."""

    text_tokens: int
    labels: int
    labels_cached: int


@dataclass(frozen=True, slots=True)
class ClassifyResponse:
    """All that the service said to a classify call: one result for each text, in order, and what they share."""

    results: list[Classification]
    warnings: list[Warning_]
    model: ModelIdentity
    usage: Usage


@dataclass(frozen=True, slots=True)
class LabelSetReport:
    """The service's answer to who posts a label set.

    new: whether it was not known before; a known one keeps the name and the order that it has
    labels, descriptions: how many; labels_cached: how many descriptions had not to be encoded anew
    """

    id: str
    new: bool
    name: str | None
    labels: int
    descriptions: int
    labels_cached: int
    warnings: list[Warning_]


@dataclass(frozen=True, slots=True)
class KeptLabelSet:
    """A label set that the service keeps."""

    id: str
    name: str | None
    labels: LabelSet


def parse_json(body: bytes | str, request_id: str | None = None) -> dict[str, Any]:
    """The JSON object in an answer; `InvalidAnswerError` where it is none."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidAnswerError(
            f"the answer is no JSON: {error}; check that the url is that of a tokenalign service", request_id=request_id
        ) from error
    if not isinstance(value, dict):
        raise InvalidAnswerError("the answer is no JSON object", request_id=request_id)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def classify_response(answer: Mapping[str, Any], request_id: str | None = None, *, texts: int) -> ClassifyResponse:
    """The answer to one request of so many texts."""
    results = _field(answer, "results", list, request_id)
    if len(results) != texts:
        raise InvalidAnswerError(f"{len(results):,} results for {texts:,} texts", request_id=request_id)
    warnings = warning_list(answer, request_id)
    return ClassifyResponse(
        [classification(result, warnings_of(warnings, i), request_id) for i, result in enumerate(results)],
        warnings,
        model_identity(answer, request_id),
        usage(answer, request_id),
    )


def classification(result: object, warnings: list[Warning_], request_id: str | None = None) -> Classification:
    """One of the service's results as the library gives it: scores and logits by label name, best first."""
    if not isinstance(result, Mapping):
        raise InvalidAnswerError("a result is no JSON object", request_id=request_id)
    ranked = _field(result, "scores", list, request_id)
    if "label" not in result or "score" not in result or not all(isinstance(entry, Mapping) for entry in ranked):
        raise InvalidAnswerError("a result lacks label or score, or its scores are no objects", request_id=request_id)
    found = {
        "label": result["label"],
        "score": result["score"] if result["score"] is None else _number(result, "score", request_id),
        "scores": {entry.get("label"): _number(entry, "score", request_id) for entry in ranked},
    }
    if any("logit" in entry for entry in ranked):
        found["logits"] = {entry.get("label"): _number(entry, "logit", request_id) for entry in ranked}
    # Keys that a newer service adds are passed on as they are.
    found |= {key: value for key, value in result.items() if key not in found}
    return cast("Classification", {"truncation": None, **found, "warnings": result.get("warnings", warnings)})


def warnings_of(warnings: Iterable[Warning_], text: int) -> list[Warning_]:
    """The warnings that concern text number `text`: its own, and those of the labels."""
    return [w for w in warnings if w["loc"][:1] != ["texts"] or w["loc"][:2] == ["texts", text]]


def joined(question: Question, parts: Sequence[Part], answers: Sequence[ClassifyResponse]) -> ClassifyResponse:
    """The answers to the parts of a question as the answer to the whole.

    Raises `FingerprintMismatchError` where two models gave them, since their scores can't be compared.
    """
    warnings: dict[str, Warning_] = {}
    results: list[Classification] = []
    for part, answer in zip(parts, answers, strict=True):
        if answer.model["fingerprint"] != answers[0].model["fingerprint"]:
            raise FingerprintMismatchError(
                "an answer of several requests", answers[0].model["fingerprint"], answer.model["fingerprint"]
            )
        for warning in moved_warnings(answer.warnings, part.start, question):
            warnings.setdefault(json.dumps(warning, sort_keys=True), warning)
        results += [
            cast("Classification", {**r, "warnings": moved_warnings(r["warnings"], part.start, question)})
            for r in answer.results
        ]
    usages = [answer.usage for answer in answers]
    together = sum if question.labels_per_text else max
    return ClassifyResponse(
        results,
        list(warnings.values()),
        answers[0].model,
        Usage(
            text_tokens=sum(u["text_tokens"] for u in usages),
            labels=together(u["labels"] for u in usages),
            labels_cached=(sum if question.labels_per_text else min)(u["labels_cached"] for u in usages),
        ),
    )


def moved_warnings(warnings: Iterable[Warning_], start: int, question: Question) -> list[Warning_]:
    """Warnings of a part, with places in what the caller gave."""
    per_text = question.labels_per_text
    return [
        cast("Warning_", {**w, "loc": list(moved_loc(tuple(w["loc"]), start, labels_per_text=per_text))})
        for w in warnings
    ]


def nothing_asked(info: ModelInfo) -> ClassifyResponse:
    """The answer to no texts at all, for which there is no request."""
    model = ModelIdentity(name=info["name"], fingerprint=info["fingerprint"])
    return ClassifyResponse([], [], model, Usage(text_tokens=0, labels=0, labels_cached=0))


def warning_list(answer: Mapping[str, Any], request_id: str | None = None) -> list[Warning_]:
    """The warnings of an answer."""
    found = _field(answer, "warnings", list, request_id)
    if not all(isinstance(w, Mapping) and isinstance(w.get("loc"), list) for w in found):
        raise InvalidAnswerError("a warning has no place", request_id=request_id)
    return cast("list[Warning_]", found)


def model_identity(answer: Mapping[str, Any], request_id: str | None = None) -> ModelIdentity:
    """Which model answered."""
    model = _field(answer, "model", dict, request_id)
    for key in ("name", "fingerprint"):
        _field(model, key, str, request_id)
    return cast("ModelIdentity", model)


def usage(answer: Mapping[str, Any], request_id: str | None = None) -> Usage:
    """What the answer cost."""
    found = _field(answer, "usage", dict, request_id)
    for key in ("text_tokens", "labels", "labels_cached"):
        _field(found, key, int, request_id)
    return cast("Usage", found)


def model_info(answer: Mapping[str, Any], request_id: str | None = None) -> ModelInfo:
    """The answer of `GET /v1/model`."""
    for key in ("name", "fingerprint"):
        _field(answer, key, str, request_id)
    limits = _field(answer, "limits", dict, request_id)
    for key in ("max_texts", "max_body_bytes"):
        if _field(limits, key, int, request_id) < 1:
            raise InvalidAnswerError(f"limits.{key} is {limits[key]}, no limit", request_id=request_id)
    return cast("ModelInfo", dict(answer))


def label_set_report(answer: Mapping[str, Any], request_id: str | None = None, *, new: bool) -> LabelSetReport:
    """The answer of `POST /v1/label-sets`."""
    counts = {key: _field(answer, key, int, request_id) for key in ("labels", "descriptions", "labels_cached")}
    set_id, warnings = _field(answer, "id", str, request_id), warning_list(answer, request_id)
    return LabelSetReport(id=set_id, new=new, name=answer.get("name"), warnings=warnings, **counts)


def kept_label_set(answer: Mapping[str, Any], request_id: str | None = None) -> KeptLabelSet:
    """The answer of `GET /v1/label-sets/{id}`."""
    set_id, labels = _field(answer, "id", str, request_id), _field(answer, "labels", list, request_id)
    try:
        return KeptLabelSet(set_id, answer.get("name"), LabelSet.of(labels, min_labels=1, max_labels=len(labels)))
    except InputError as error:
        raise InvalidAnswerError(f"the labels of the set are none: {error}", request_id=request_id) from error


def _field(value: Mapping[str, Any], key: str, kind: type[Any], request_id: str | None) -> Any:
    found = value.get(key)
    if not isinstance(found, kind) or isinstance(found, bool):
        raise InvalidAnswerError(
            f"the answer's {key} is {'missing' if key not in value else f'no {kind.__name__}'}; "
            "check that the url is that of a tokenalign service of this version",
            request_id=request_id,
        )
    return found


def _number(value: Mapping[str, Any], key: str, request_id: str | None) -> float:
    found = value.get(key)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
        raise InvalidAnswerError(f"a {key} in the answer is no finite number", request_id=request_id)
    return float(found)
