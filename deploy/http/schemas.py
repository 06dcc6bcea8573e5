"""The native API's bodies: what a request may hold, what an answer looks like, and their OpenAPI schemas."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from deploy.http.limits import json_type
from deploy.settings import LimitSettings
from deploy.wire import Answer
from tokenalign.errors import InputError
from tokenalign.labels import LabelSet, check_text
from tokenalign.results import Explain, check_top_k, match_list, ranking, truncation_report
from tokenalign.text import TokenizedTexts

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
_Explain = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "all"}]})]
_Flag = Annotated[Any, WithJsonSchema({"type": "boolean"})]
_TopK = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]})]


class ClassifyRequest(BaseModel):
    """Texts and the labels to choose from. Exactly one of `text` and `texts`.

    Keys and values are checked by `parse_classify`, values with the library's own code, so that errors read the same.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "text": "I was charged twice for the same card purchase.",
                "labels": ["duplicate card payment", "cash withdrawal declined", "card not received"],
            }
        },
    )

    text: _Text = Field(default=None, description="One text; gives one result.")
    texts: _Texts = Field(default=None, description="Several texts; results come in their order.")
    labels: _Labels = Field(
        description="Candidates: strings, or objects with a name and one or several descriptions to match."
    )
    explain: _Explain = Field(
        default=False, description="true: matches of the best label; 'all': of every returned label."
    )
    return_logits: _Flag = Field(default=False, description="Add each label's calibrated logit.")
    top_k: _TopK = Field(default=None, description="Return only so many labels; scores still are over all of them.")


@dataclass(frozen=True, slots=True)
class ClassifyQuery:
    """A request that is known to be good. `single`: the caller sent `text`, not `texts`."""

    texts: tuple[str, ...]
    single: bool
    labels: LabelSet
    explain: Explain
    return_logits: bool
    top_k: int | None


def parse_classify(body: dict[str, Any], limits: LimitSettings) -> ClassifyQuery:
    """The checked request; `InputError` names field, value, limit and remedy of the first thing at fault."""
    _check_keys(body)
    request = ClassifyRequest.model_validate(body)
    return_logits = _check_flag(request.return_logits, "return_logits")
    check_top_k(request.top_k)
    return ClassifyQuery(
        texts=_check_texts(body, limits),
        single="text" in body,
        labels=LabelSet.of(
            request.labels,
            min_labels=1 if return_logits else 2,
            max_labels=limits.max_labels,
            max_chars=limits.max_text_chars,
        ),
        explain=_check_explain(request.explain),
        return_logits=return_logits,
        top_k=request.top_k,
    )


def _check_keys(body: dict[str, Any]) -> None:
    """Not pydantic's errors: a key may be long, or hold a lone surrogate, which no answer could repeat."""
    known = ClassifyRequest.model_fields
    for key in body:
        if key not in known:
            shown = key[:100].encode("utf-8", "backslashreplace").decode("utf-8")
            raise InputError(f"is not a key of this request; it takes {', '.join(known)}", (shown,))
    if "labels" not in body:
        raise InputError("is missing; send the candidate labels as a list", ("labels",))


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


def result_json(query: ClassifyQuery, text: str, tokenized: TokenizedTexts, answer: Answer) -> dict[str, Any]:
    """One element of `results`; tokenized: that text alone."""
    names = query.labels.names
    order = ranking(answer.logits, query.top_k).tolist()
    scores, logits = answer.scores.tolist(), answer.logits.tolist()
    if query.return_logits:
        ranked = [{"label": names[i], "score": scores[i], "logit": logits[i]} for i in order]
    else:
        ranked = [{"label": names[i], "score": scores[i]} for i in order]
    result: dict[str, Any] = {
        "label": names[order[0]],
        "score": scores[order[0]],
        "scores": ranked,
        "truncation": truncation_report(tokenized.truncations[0]),
    }
    if query.explain:
        result["matches"] = match_list(query.labels, answer.alignments, text, tokenized.kept_spans(0))
    return result


def response_json(
    query: ClassifyQuery,
    tokenized: Sequence[TokenizedTexts],
    answers: Sequence[Answer],
    model: dict[str, str],
) -> dict[str, Any]:
    """The whole answer; one tokenised text and one answer for each text of the query, in order."""
    return {
        "results": [
            result_json(query, text, tokens, answer)
            for text, tokens, answer in zip(query.texts, tokenized, answers, strict=True)
        ],
        "warnings": list(answers[0].report.warnings),
        "model": model,
        "usage": {
            "text_tokens": sum(len(tokens.tokens.values) for tokens in tokenized),
            "labels": len(query.labels.descriptions),
            "labels_cached": min(answer.report.cached for answer in answers),
        },
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


class MatchSchema(_Answered):
    label: str
    token: str
    label_span: tuple[int, int]
    span: tuple[int, int] = Field(description="Code points of the text as sent.")
    text: str
    similarity: float
    contribution: float = Field(description="Part of the label's logit; those of a label sum to it.")


class ResultSchema(_Answered):
    label: str
    score: float
    scores: list[ScoreSchema] = Field(description="Best first; they sum to 1 over the supplied labels.")
    truncation: TruncationSchema | None
    matches: list[MatchSchema] | None = Field(default=None, description="Only with explain.")


class WarningSchema(_Answered):
    loc: list[str | int]
    type: Literal["truncated", "indistinguishable"]
    message: str


class UsageSchema(_Answered):
    text_tokens: int
    labels: int = Field(description="Label descriptions in the request.")
    labels_cached: int = Field(description="Of those, how many were not encoded anew.")


class ModelSchema(_Answered):
    name: str
    fingerprint: str = Field(description="Changes with anything that a score depends on.")


class ClassifyResponse(_Answered):
    results: list[ResultSchema] = Field(description="One for each text, in order.")
    warnings: list[WarningSchema]
    model: ModelSchema
    usage: UsageSchema


class ErrorResponse(_Answered):
    error: str = Field(description="What is wrong, which limit, and what to do.")
    error_type: str
    loc: list[str | int] = Field(description="Path to the value at fault within the request.")
