"""The native API's bodies: what a request may hold, what an answer looks like, and their OpenAPI schemas."""

import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from deploy.http.limits import json_type
from deploy.label_cache.lru import ByteLru
from deploy.label_sets import ID_FORM, LABEL_BYTES, Definition
from deploy.settings import MIB, LimitSettings
from deploy.wire import NO_THRESHOLDS, Answer, LabelReport
from tokenalign.abstention import Thresholds
from tokenalign.errors import InputError
from tokenalign.labels import LabelSet, check_text, has_label_sets, label_sets
from tokenalign.long_text import LongText, LongTextMode
from tokenalign.results import (
    Explain,
    Warning_,
    check_top_k,
    match_list,
    min_labels,
    truncation_report,
    window_report,
)
from tokenalign.text import MAX_TEMPLATE_CHARS, Windowed

_LABEL_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            },
        },
    ]
}
_Text = Annotated[Any, WithJsonSchema({"type": "string"})]
_Texts = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1})]
_Labels = Annotated[Any, WithJsonSchema({"type": "array", "items": _LABEL_SCHEMA, "minItems": 1})]
_LabelLists = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": _LABEL_SCHEMA, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _LABEL_SCHEMA, "minItems": 1}, "minItems": 1},
            ]
        }
    ),
]
_LabelSetId = Annotated[Any, WithJsonSchema({"type": "string", "pattern": "^[0-9a-f]{32}$"})]
_Name = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]})]
_Explain = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "all"}]})]
_Flag = Annotated[Any, WithJsonSchema({"type": "boolean"})]
_Count = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})]
_Fraction = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]})
]
_MinScore = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"const": "calibrated"}, {"type": "null"}]}
    ),
]
_LongText = Annotated[Any, WithJsonSchema({"enum": ["truncate", "window", "error"]})]
_Template = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string", "pattern": "[{]label[}]"}, {"type": "null"}]})]


MAX_NAME_CHARS = 200

_seen: ByteLru[tuple[int | str, ...], LabelSet] = ByteLru(16 * MIB)


class ClassifyRequest(BaseModel):
    """Texts and the labels to choose from. Exactly one of `text` and `texts`, and one of `labels` and `label_set`.

    Keys and values are checked by `parse_classify`, values with the library's own code, so that errors read the same.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "text": "I was charged twice for the same card purchase.",
                "labels": ["duplicate card payment", "cash withdrawal declined", "card not received"],
            },
            "oneOf": [{"required": ["labels"]}, {"required": ["label_set"]}],
        },
    )

    text: _Text = Field(default=None, description="One text; gives one result.")
    texts: _Texts = Field(default=None, description="Several texts; results come in their order.")
    labels: _LabelLists = Field(
        default=None,
        description="Candidates: strings, or objects with a name and one or several descriptions to match; or a list "
        "of them for each text.",
    )
    label_set: _LabelSetId = Field(
        default=None, description="Instead of labels: the id that POST /v1/label-sets gave for them."
    )
    explain: _Explain = Field(
        default=False, description="true: matches of the best label; 'all': of every returned label."
    )
    return_logits: _Flag = Field(default=False, description="Add each label's calibrated logit.")
    top_k: _Count = Field(default=None, description="Return only so many labels; scores still are over all of them.")
    multi_label: _Flag = Field(
        default=False,
        description="Each score is the probability that its label holds, whatever the other candidates; one label is "
        "then enough, and the model must have a calibration for it.",
    )
    min_score: _MinScore = Field(
        default=None,
        description="A best score below it gives no label; `abstained` says why, scores stay. 'calibrated' is the "
        "limit that was fitted with the model, where it has one.",
    )
    min_margin: _Fraction = Field(
        default=None, description="A lead of the best score over the second best below it gives no label, likewise."
    )
    label_template: _Template = Field(
        default=None,
        description="Words around each label instead of the model's own, holding {label} once; they are not scored.",
    )
    long_text: _LongText = Field(
        default="truncate",
        description="A text of too many tokens is cut, which `truncation` tells, or read in overlapping windows, or "
        "refused.",
    )
    window_stride: _Count = Field(
        default=None, description="Tokens from one window's start to the next's; null is half a window."
    )
    model: _Name = Field(default=None, description="One of GET /v1/models by its name; null is the default one.")


class LabelSetRequest(BaseModel):
    """Labels that are to be known under an id, whose order of ties the first request for them decides."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "name": "card questions",
                "labels": ["duplicate card payment", {"name": "cash", "description": ["cash withdrawal", "no cash"]}],
            }
        },
    )

    labels: _Labels = Field(description="As in POST /v1/classify; one is enough.")
    name: _Name = Field(default=None, description="For people; a set that is known keeps the name that it has.")


@dataclass(frozen=True, slots=True)
class ClassifyQuery:
    """A request that is good as far as can be told without the model.

    single: the caller sent `text`, not `texts`
    labels: of all texts, unless there are `text_labels`, which has a set for each
    keep_labels: False has the labels encoded for this request alone, neither looked up nor kept; no key of a request
    label_template, window_stride: as sent; what they must be depends on the model
    """

    texts: tuple[str, ...]
    single: bool
    labels: LabelSet
    explain: Explain
    return_logits: bool
    top_k: int | None
    tenant: str | None = None
    multi_label: bool = False
    thresholds: Thresholds = NO_THRESHOLDS
    label_template: str | None = None
    long_text: LongTextMode = "truncate"
    window_stride: int | None = None
    text_labels: tuple[LabelSet, ...] = ()
    keep_labels: bool = True
    model: str | None = None

    def labels_of(self, text: int) -> LabelSet:
        """The candidates of text number `text`."""
        return self.text_labels[text] if self.text_labels else self.labels


def label_set_id(body: dict[str, Any]) -> str | None:
    """The id of the label set that a classify request names, None when it brings its labels.

    Raises `InputError` unless the request does exactly one of both.
    """
    _check_keys(body, ClassifyRequest)
    if "label_set" not in body:
        if "labels" not in body:
            raise InputError(
                "is missing; send the candidate labels as a list, or the id of a label set as label_set", ("labels",)
            )
        return None
    if "labels" in body:
        raise InputError("both labels and label_set are given; send one of them", ("label_set",))
    set_id = body["label_set"]
    if not isinstance(set_id, str) or not ID_FORM.fullmatch(set_id):
        raise InputError(
            f"is no id of a label set, which has 32 hex digits; it is {reprlib.repr(set_id)}. "
            "Send the one that POST /v1/label-sets gave",
            ("label_set",),
        )
    return set_id


def parse_classify(body: dict[str, Any], limits: LimitSettings, known: LabelSet | None = None) -> ClassifyQuery:
    """The checked request; `InputError` names field, value, limit and remedy of the first thing at fault.

    known: the labels of the set that `label_set_id` gave; they were checked when it was made, and are used as they are
    """
    label_set_id(body)
    request = ClassifyRequest.model_validate(body)
    return_logits = _check_flag(request.return_logits, "return_logits")
    multi_label = _check_flag(request.multi_label, "multi_label")
    check_top_k(request.top_k)
    texts = _check_texts(body, limits)
    fewest = min_labels(return_logits=return_logits, multi_label=multi_label)
    sets = _check_labels(request.labels, len(texts), fewest, limits) if known is None else (known,)
    if known is not None:
        LabelSet.of(known, min_labels=fewest, max_labels=limits.max_labels, loc=("label_set",))
    long_text = _check_long_text(request.long_text, request.window_stride)
    return ClassifyQuery(
        texts=texts,
        single="text" in body,
        labels=sets[0],
        explain=_check_explain(request.explain),
        return_logits=return_logits,
        top_k=request.top_k,
        multi_label=multi_label,
        thresholds=Thresholds.of(request.min_score, request.min_margin, fewest_labels=min(map(len, sets))),
        label_template=_check_template(request.label_template),
        long_text=long_text.mode,
        window_stride=long_text.stride,
        text_labels=sets if known is None and has_label_sets(request.labels) else (),
        model=None if request.model is None else check_text(request.model, ("model",), MAX_NAME_CHARS, "name"),
    )


def parse_label_set(body: dict[str, Any], limits: LimitSettings) -> tuple[LabelSet, str | None]:
    """The labels of a label set and its name; `InputError` as for a classify request."""
    _check_keys(body, LabelSetRequest)
    if "labels" not in body:
        raise InputError("is missing; send the candidate labels as a list", ("labels",))
    # One is enough: whether two are needed depends on what is asked of the set.
    labels = LabelSet.of(body["labels"], min_labels=1, max_labels=limits.max_labels, max_chars=limits.max_text_chars)
    name = body.get("name")
    return labels, None if name is None else check_text(name, ("name",), MAX_NAME_CHARS, "name")


def _check_keys(body: dict[str, Any], request: type[BaseModel]) -> None:
    """Not pydantic's errors: a key may be long, or hold a lone surrogate, which no answer could repeat."""
    known = request.model_fields
    for key in body:
        if key not in known:
            shown = key[:100].encode("utf-8", "backslashreplace").decode("utf-8")
            raise InputError(f"is not a key of this request; it takes {', '.join(known)}", (shown,))


def _check_texts(body: dict[str, Any], limits: LimitSettings) -> tuple[str, ...]:
    given = [key for key in ("text", "texts") if key in body]
    if len(given) != 1:
        both = (
            "both text and texts are given; send one of them" if given else "neither text nor texts is given; send one"
        )
        raise InputError(both, ("text",))
    if given == ["text"]:
        return (check_text(body["text"], ("text",), limits.max_text_chars),)
    texts = body["texts"]
    if not isinstance(texts, list):
        raise InputError(
            f"must be a list of strings, not {json_type(texts)}; for one text use the key text", ("texts",)
        )
    if not texts:
        raise InputError("is an empty list; send at least one text", ("texts",))
    if len(texts) > limits.max_texts:
        raise InputError(
            f"{len(texts):,} texts given, at most {limits.max_texts:,} allowed (limits.max_texts); "
            "send them in several requests",
            ("texts",),
        )
    return tuple(check_text(text, ("texts", i), limits.max_text_chars) for i, text in enumerate(texts))


def _check_flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"must be true or false; it is {reprlib.repr(value)}", (key,))
    return value


def _check_explain(value: object) -> Explain:
    if isinstance(value, bool):
        return value
    if value == "all":
        return "all"
    raise InputError(f'must be true, false or "all"; it is {reprlib.repr(value)}', ("explain",))


def _check_labels(labels: object, texts: int, fewest: int, limits: LimitSettings) -> tuple[LabelSet, ...]:
    """The label sets; the same list of strings again, which many callers send, is known by comparing alone."""
    key = (limits.max_text_chars, *labels) if isinstance(labels, list) and set(map(type, labels)) == {str} else None
    if key is not None and (known := _seen.get(key)) is not None:
        return (LabelSet.of(known, min_labels=fewest, max_labels=limits.max_labels),)
    sets = label_sets(labels, texts, min_labels=fewest, max_labels=limits.max_labels, max_chars=limits.max_text_chars)
    if key is not None:
        _seen.put(key, sets[0], sum(map(len, sets[0].names)) + LABEL_BYTES * len(sets[0]))
    return sets


def _check_template(template: object) -> str | None:
    if template is None:
        return None
    return check_text(template, ("label_template",), MAX_TEMPLATE_CHARS, "template")


def _check_long_text(mode: Any, stride: Any) -> LongText:
    if stride is not None and (isinstance(stride, bool) or not isinstance(stride, int) or stride < 1):
        raise InputError(
            f"must be a whole number of at least 1, or null for half a window; it is {reprlib.repr(stride)}",
            ("window_stride",),
        )
    return LongText.of(mode, stride, window_tokens=sys.maxsize if stride is None else stride)


def result_json(query: ClassifyQuery, index: int, windowed: Windowed, answer: Answer) -> dict[str, Any]:
    """The element of `results` for text number `index`; windowed: that text alone."""
    labels = query.labels_of(index)
    names = [labels.labels[i].name for i in answer.order.tolist()]
    scores = answer.scores.tolist()
    if query.return_logits:
        logits = answer.logits.tolist()
        ranked = [{"label": n, "score": s, "logit": x} for n, s, x in zip(names, scores, logits, strict=True)]
    else:
        ranked = [{"label": n, "score": s} for n, s in zip(names, scores, strict=True)]
    result: dict[str, Any] = {
        "label": names[0] if answer.abstained is None else None,
        "score": scores[0],
        "scores": ranked,
        "truncation": truncation_report(windowed.tokenized.truncations[0]),
    }
    if answer.abstained is not None:
        result["abstained"] = answer.abstained
    if query.long_text == "window":
        result["windows"] = window_report(windowed, 0, answer.alignments[0])
    if query.explain:
        result["matches"] = match_list(labels, answer.alignments, query.texts[index], windowed.kept_spans(0))
    return result


def response_json(
    query: ClassifyQuery,
    windowed: Sequence[Windowed],
    answers: Sequence[Answer],
    model: dict[str, str],
) -> dict[str, Any]:
    """The whole answer; one text with its windows and one answer for each text of the query, in order."""
    return {
        "results": [
            result_json(query, i, windows, answer)
            for i, (windows, answer) in enumerate(zip(windowed, answers, strict=True))
        ],
        **summary_json(query, windowed, [answer.report for answer in answers], model),
    }


def summary_json(
    query: ClassifyQuery, windowed: Sequence[Windowed], reports: Sequence[LabelReport], model: dict[str, Any]
) -> dict[str, Any]:
    """What the results of a request share: warnings, model and usage; one report for each text."""
    if not query.text_labels:
        warnings = list(reports[0].warnings)
        labels, cached = len(query.labels.descriptions), min(report.cached for report in reports)
    else:
        warnings = [
            Warning_(**{**warning, "loc": placed_labels(warning["loc"], i)})
            for i, report in enumerate(reports)
            for warning in report.warnings
        ]
        least: dict[LabelSet, int] = {}
        for candidates, report in zip(query.text_labels, reports, strict=True):
            least[candidates] = min(report.cached, least.get(candidates, report.cached))
        labels, cached = sum(len(candidates.descriptions) for candidates in least), sum(least.values())
    return {
        "warnings": warnings,
        "model": model,
        "usage": {
            "text_tokens": sum(len(windows.tokenized.tokens.values) for windows in windowed),
            "labels": labels,
            "labels_cached": cached,
        },
    }


def placed_labels(loc: Sequence[str | int], text: int) -> list[str | int]:
    """A place within a list of labels, as a place within the lists of which text number `text` has that one."""
    return [*loc[:1], text, *loc[1:]]


def label_set_json(definition: Definition, report: LabelReport) -> dict[str, Any]:
    """The answer to who posts a label set; the warnings' places are those of the request."""
    return {
        "id": definition.set_id,
        "name": definition.name,
        "labels": len(definition.labels),
        "descriptions": len(definition.labels.descriptions),
        "labels_cached": report.cached,
        "warnings": list(report.warnings),
    }


class _Answered(BaseModel):
    """Base of the documented answers; they are written by `response_json`, and these schemas describe it."""


class ScoreSchema(_Answered):
    label: str
    score: float
    logit: float | None = Field(default=None, description="Only with return_logits.")


class TruncationSchema(_Answered):
    tokens: int = Field(description="Tokens that the text has, template and special tokens included.")
    used: int = Field(description="Tokens that the model saw.")
    cut_at: int = Field(description="Code point of the text from which on nothing was seen.")


class AbstentionSchema(_Answered):
    reason: Literal["min_score", "min_margin"] = Field(description="Which limit was not reached.")
    value: float
    limit: float


class WindowsSchema(_Answered):
    count: int
    best: int = Field(description="The window that carries most of the best label's logit.")
    spans: list[tuple[int, int]] = Field(description="Code points of each window in the text as sent.")


class MatchSchema(_Answered):
    label: str
    description: str = Field(description="The wording that the token is of; of several, the one that matched best.")
    token: str
    label_span: tuple[int, int]
    span: tuple[int, int] = Field(description="Code points of the text as sent.")
    text: str
    similarity: float
    contribution: float = Field(description="Part of the label's logit; those of a label sum to it.")


class ResultSchema(_Answered):
    label: str | None = Field(description="null where `abstained` says why.")
    score: float = Field(description="Of the best label, whether or not it is named.")
    scores: list[ScoreSchema] = Field(
        description="Best first; they sum to 1 over the supplied labels, unless multi_label asks for independent ones."
    )
    truncation: TruncationSchema | None
    abstained: AbstentionSchema | None = Field(default=None, description="Only where no label is named.")
    windows: WindowsSchema | None = Field(default=None, description='Only with long_text "window".')
    matches: list[MatchSchema] | None = Field(default=None, description="Only with explain.")


class WarningSchema(_Answered):
    loc: list[str | int]
    type: Literal["truncated", "indistinguishable"]
    message: str


class LabelSetWarningSchema(_Answered):
    loc: list[str | int]
    type: Literal["truncated", "indistinguishable", "near_duplicate", "not_compared"]
    message: str


class UsageSchema(_Answered):
    text_tokens: int
    labels: int = Field(description="Label descriptions in the request, of equal lists once.")
    labels_cached: int = Field(description="Of those, how many were not encoded anew.")


class ModelSchema(_Answered):
    name: str
    fingerprint: str = Field(description="Changes with anything that a score depends on.")


class ListedModelSchema(ModelSchema):
    default: bool = Field(description="Whether it answers requests that name no model.")


class ModelsSchema(_Answered):
    models: list[ListedModelSchema] = Field(description="The default one first.")


class ClassifyResponse(_Answered):
    results: list[ResultSchema] = Field(description="One for each text, in order.")
    warnings: list[WarningSchema]
    model: ModelSchema
    usage: UsageSchema


class LabelSetSchema(_Answered):
    id: str = Field(description="The same for the same labels in any order.")
    name: str | None
    labels: int = Field(description="Labels of the set.")
    descriptions: int = Field(description="Their descriptions, each of which is encoded once.")
    labels_cached: int = Field(description="Of the descriptions, how many had not to be encoded anew.")
    warnings: list[LabelSetWarningSchema] = Field(
        description="Labels that were cut, or that the model can't or hardly tell apart; places in the request."
    )


class LabelSetDefinitionSchema(_Answered):
    id: str
    name: str | None
    labels: _Labels = Field(description="As a request takes them, in the order of who posted them first.")


class ErrorResponse(_Answered):
    error: str = Field(description="What is wrong, which limit, and what to do.")
    error_type: str
    loc: list[str | int] = Field(description="Path to the value at fault within the request.")
    request_id: str = Field(description="The request's X-Request-ID, by which the service's logs are searched.")
