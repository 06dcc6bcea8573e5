"""The classification and reranking routes of text-embeddings-inference: `POST /predict` and `POST /rerank`."""

from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.answers import answer
from deploy.http.dialects.fields import Fields, array, string, strings
from deploy.http.dialects.reranking import ranking, rerank_call
from deploy.http.dialects.seam import Call, Native, Place, error_answers, json_body, moved
from deploy.http.errors import HttpError, NotServedError
from tokenalign.errors import InputError, Loc

ErrorType = Literal["Validation", "Overloaded", "Unhealthy", "Backend"]

_RERANK_PLACE = moved({("texts",): ("texts",), ("labels", 0): ("query",), ("labels",): ("query",)})
_UNSET = (
    "no label set is configured for /predict; set dialects.predict_label_set to the id of a label set, or to the name "
    "of one of label_sets.warm, or send the labels to /v1/classify"
)

_OPTIONS = {
    "truncate": {
        "type": ["boolean", "null"],
        "default": False,
        "description": "Cut texts that have too many tokens; false refuses them, as the answer has no place to say so.",
    },
    "truncation_direction": {
        "enum": ["right", "Right", None],
        "description": "Texts are cut at their end, never at their beginning.",
    },
    "raw_scores": {"type": ["boolean", "null"], "default": False, "description": "Calibrated logits as scores."},
}
_SINGLE = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
_PREDICT_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["inputs"],
    "properties": {
        "inputs": {
            "anyOf": [{"type": "string"}, _SINGLE, {"type": "array", "items": _SINGLE, "minItems": 1}],
            "description": "One text, or a batch of texts as lists of one. Pairs of texts are not scored.",
        },
        **_OPTIONS,
    },
}
_RERANK_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["query", "texts"],
    "properties": {
        "query": {"type": "string", "description": "What the texts are ranked by; it is not kept in the label store."},
        "texts": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "return_text": {"type": ["boolean", "null"], "default": False},
        **_OPTIONS,
    },
}


class Prediction(BaseModel):
    score: float
    label: str


class Rank(BaseModel):
    index: int = Field(description="Position among the texts of the request.")
    text: str | None = Field(default=None, description="Only with return_text.")
    score: float = Field(description="Mean best cosine of the query's tokens, within [0, 1].")


class TextEmbeddingsInferenceError(BaseModel):
    error: str
    error_type: ErrorType


def add_routes(app: FastAPI, native: Native) -> None:
    """Adds both routes to the application."""

    @app.post(
        "/predict",
        summary="Score texts against the configured label set, as text-embeddings-inference does",
        description="The label set is dialects.predict_label_set of the settings. Best label first.",
        response_model=list[Prediction] | list[list[Prediction]],
        responses=error_answers(TextEmbeddingsInferenceError, 404, 413, 422, 429, 500, 503, 504),
        openapi_extra=json_body(_PREDICT_SCHEMA, {"inputs": "I was charged twice for the same card purchase."}),
    )
    async def predict(request: Request) -> Response:
        return await answer(_predict(native, request), error_body)

    @app.post(
        "/rerank",
        summary="Rank texts by a query, as text-embeddings-inference does",
        response_model=list[Rank],
        responses=error_answers(TextEmbeddingsInferenceError, 413, 422, 429, 500, 503, 504),
        openapi_extra=json_body(
            _RERANK_SCHEMA, {"query": "card not received", "texts": ["Where is my card?", "I was charged twice."]}
        ),
    )
    async def rerank(request: Request) -> Response:
        return await answer(_rerank(native, request), error_body)


async def _predict(native: Native, request: Request) -> Any:
    fields = Fields(await native.read_json(request), ("inputs", *_OPTIONS))
    texts, place = _inputs(
        fields.required("inputs", "a text, or a batch of texts as lists of one"), fields.at("inputs")
    )
    options = _Options.of(fields)
    label_set = native.service.predict_label_set()
    if label_set is None:
        raise NotServedError(_UNSET)
    body = {"label_set": label_set, "return_logits": options.raw_scores}
    call = Call({"text" if isinstance(texts, str) else "texts": texts, **body}, place)
    results = (await native.ask(request, call))["results"]
    options.check(results, call)
    number = "logit" if options.raw_scores else "score"
    answers = [[{"score": s[number], "label": s["label"]} for s in result["scores"]] for result in results]
    return answers[0] if isinstance(texts, str) else answers


async def _rerank(native: Native, request: Request) -> Any:
    fields = Fields(await native.read_json(request), ("query", "texts", "return_text", *_OPTIONS))
    query = string(fields.required("query", "the query as a string"), fields.at("query"))
    texts = strings(fields.required("texts", "the texts as a list of strings"), fields.at("texts"))
    return_text, options = fields.flag("return_text"), _Options.of(fields)
    call = rerank_call(query, texts, _RERANK_PLACE)
    answered = await native.ask(request, call)
    options.check(answered["results"], call)
    return [
        {
            "index": document.index,
            **({"text": texts[document.index]} if return_text else {}),
            "score": document.logit if options.raw_scores else document.score,
        }
        for document in ranking(answered["results"], native.service.logit_scale(answered["model"]["name"]))
    ]


@dataclass(frozen=True, slots=True)
class _Options:
    """What both routes take. A text that was cut and may not be is an error: the answer has no place to say so."""

    truncate: bool
    raw_scores: bool

    @classmethod
    def of(cls, fields: Fields) -> "_Options":
        direction = fields.get("truncation_direction")
        if direction not in (None, "right", "Right"):
            raise InputError(
                "must be right: texts are cut at their end; leave it out", fields.at("truncation_direction")
            )
        return cls(fields.flag("truncate"), fields.flag("raw_scores"))

    def check(self, results: list[dict[str, Any]], call: Call) -> None:
        """`InputError` for the first text that was cut, unless it may be; results: of the native answer to `call`."""
        for i, result in enumerate(results):
            cut = result["truncation"]
            if cut is not None and not self.truncate:
                raise InputError(
                    f"has {cut['tokens']:,} tokens, at most {cut['used']:,} are read; shorten or split it, or send "
                    "truncate: true to have its end left out",
                    call.place(("text",) if "text" in call.body else ("texts", i)),
                )


def _inputs(inputs: object, loc: Loc) -> tuple[str | list[str], Place]:
    """The texts of a prediction, one or many, and where each stands."""
    if isinstance(inputs, str):
        return inputs, moved({("text",): loc})
    if isinstance(inputs, list) and inputs and isinstance(inputs[0], str):
        return _only(inputs, loc), moved({("text",): (*loc, 0)})
    batch = [
        _only(array(item, (*loc, i), "strings"), (*loc, i))
        for i, item in enumerate(array(inputs, loc, "lists of one string, or one string"))
    ]

    def place(native: Loc) -> Loc:
        if native[:1] != ("texts",):
            return ()
        return (*loc, *native[1:], 0) if len(native) > 1 else loc

    return batch, place


def _only(items: list[Any], loc: Loc) -> str:
    if len(items) != 1:
        raise InputError(
            f"has {len(items):,} strings: a list of two is a pair, and pairs are not scored; "
            "for several texts send a list of lists of one string each",
            loc,
        )
    return string(items[0], (*loc, 0))


def error_body(found: HttpError) -> dict[str, Any]:
    """An error as this dialect's clients read it."""
    kinds: dict[int, ErrorType] = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}
    return {"error": found.message, "error_type": kinds.get(found.status, "Validation")}
