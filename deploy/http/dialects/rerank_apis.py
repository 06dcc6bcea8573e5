"""The reranking routes of Cohere and Jina: `POST /v2/rerank` (Cohere v2) and `POST /v1/rerank` (Cohere v1 and Jina)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from deploy.http.answers import answer
from deploy.http.dialects.fields import Fields, array, string
from deploy.http.dialects.reranking import Ranked, ranking, rerank_call
from deploy.http.dialects.seam import Native, error_answers, json_body
from deploy.http.errors import HttpError
from deploy.http.limits import json_type
from tokenalign.errors import InputError, Loc

_KEYS = (
    *("model", "query", "documents", "top_n", "return_documents"),
    *("max_tokens_per_doc", "max_chunks_per_doc", "rank_fields", "priority"),
)
_COUNT = {"type": ["integer", "null"], "minimum": 1}
_DOCUMENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["text"],
            "properties": {"text": {"type": "string"}},
        },
    ]
}


class DocumentText(BaseModel):
    text: str


class RerankResult(BaseModel):
    index: int = Field(description="Position among the documents of the request.")
    relevance_score: float = Field(description="Mean best cosine of the query's tokens, within [0, 1].")
    document: DocumentText | None = Field(default=None, description="Only with return_documents.")


class ApiVersion(BaseModel):
    version: str


class Tokens(BaseModel):
    input_tokens: int = Field(description="Of the documents as they were read.")


class Meta(BaseModel):
    api_version: ApiVersion
    tokens: Tokens
    warnings: list[str] | None = Field(default=None, description="Which documents, or whether the query, were cut.")


class Usage(BaseModel):
    total_tokens: int = Field(description="Of the documents as they were read.")


class RerankAnswer(BaseModel):
    id: str
    results: list[RerankResult] = Field(description="Best first.")
    meta: Meta


class RerankAnswerV1(RerankAnswer):
    model: str = Field(description="The model that answered.")
    usage: Usage


class RerankError(BaseModel):
    message: str


def add_routes(app: FastAPI, native: Native) -> None:
    """Adds both routes to the application."""

    @app.post(
        "/v2/rerank",
        summary="Rank documents by a query, as Cohere's v2 API does",
        response_model=RerankAnswer,
        responses=error_answers(RerankError, 413, 422, 429, 500, 503, 504),
        openapi_extra=_documented(with_documents=False),
    )
    async def rerank_v2(request: Request) -> Response:
        return await answer(_rerank_v2(native, request), error_body)

    @app.post(
        "/v1/rerank",
        summary="Rank documents by a query, as Cohere's v1 API and Jina's do",
        response_model=RerankAnswerV1,
        responses=error_answers(RerankError, 413, 422, 429, 500, 503, 504),
        openapi_extra=_documented(with_documents=True),
    )
    async def rerank_v1(request: Request) -> Response:
        return await answer(_rerank_v1(native, request), error_body)


@dataclass(frozen=True, slots=True)
class RerankQuery:
    """A checked request of either API; places: where each document's text stands."""

    model: str | None
    query: str
    documents: Sequence[str]
    places: Sequence[Loc]
    top_n: int | None
    return_documents: bool
    max_tokens_per_doc: int | None

    @classmethod
    def of(cls, body: dict[str, Any], *, with_documents: bool) -> "RerankQuery":
        """The request in `body`; with_documents: whether the answer repeats them unless told otherwise."""
        fields = Fields(body, _KEYS)
        query = string(fields.required("query", "the query as a string"), fields.at("query"))
        given = array(
            fields.required("documents", "the documents as a list of strings"), fields.at("documents"), "documents"
        )
        read = [_document(item, (*fields.at("documents"), i)) for i, item in enumerate(given)]
        if fields.get("rank_fields") not in (None, ["text"]):
            raise InputError('must be ["text"]: documents have one field; leave it out', fields.at("rank_fields"))
        if fields.count("max_chunks_per_doc") not in (None, 1):
            raise InputError(
                "must be 1: a document is read from its start, once; leave it out", fields.at("max_chunks_per_doc")
            )
        fields.whole("priority")
        return cls(
            model=fields.text("model"),
            query=query,
            documents=[text for text, _ in read],
            places=[place for _, place in read],
            top_n=fields.count("top_n"),
            return_documents=fields.flag("return_documents", with_documents),
            max_tokens_per_doc=fields.count("max_tokens_per_doc"),
        )

    def place(self, native: Loc) -> Loc:
        """Where in this request stands what has a place in the native one."""
        match native:
            case ("texts", int(i), *rest):
                return (*self.places[i], *rest)
            case ("texts",):
                return ("documents",)
            case ("labels", *_):
                return ("query",)
        return ()


async def _rerank_v2(native: Native, request: Request) -> dict[str, Any]:
    query = RerankQuery.of(await native.read_json(request), with_documents=False)
    answered, _ = await _ask(native, request, query, "2")
    return answered


async def _rerank_v1(native: Native, request: Request) -> dict[str, Any]:
    query = RerankQuery.of(await native.read_json(request), with_documents=True)
    answered, model = await _ask(native, request, query, "1")
    usage = {"total_tokens": answered["meta"]["tokens"]["input_tokens"]}
    return {"model": model, "usage": usage, **answered}


async def _ask(native: Native, request: Request, query: RerankQuery, version: str) -> tuple[dict[str, Any], str]:
    """What both versions answer, and the name of the model that did."""
    served = native.models()
    model = query.model if query.model in served else None
    answered = await native.ask(request, rerank_call(query.query, query.documents, query.place, model))
    name: str = answered["model"]["name"]
    meta: dict[str, Any] = {
        "api_version": {"version": version},
        "tokens": {"input_tokens": answered["usage"]["text_tokens"]},
    }
    warnings = _warnings(query, answered, served)
    if warnings:
        meta["warnings"] = warnings
    ranked = ranking(answered["results"], native.service.logit_scale(name))[: query.top_n]
    return {"id": str(uuid4()), "results": [_result(query, document) for document in ranked], "meta": meta}, name


def _result(query: RerankQuery, document: Ranked) -> dict[str, Any]:
    result: dict[str, Any] = {"index": document.index, "relevance_score": document.score}
    if query.return_documents:
        result["document"] = {"text": query.documents[document.index]}
    return result


def _warnings(query: RerankQuery, answered: dict[str, Any], served: Sequence[str]) -> list[str]:
    """What was not done as asked, in sentences: what was cut, and by which model."""
    found = [f"query: {warning['message']}" for warning in answered["warnings"]]
    for i, result in enumerate(answered["results"]):
        if result["truncation"] is not None:
            cut = result["truncation"]
            found.append(
                f"documents[{i}]: has {cut['tokens']:,} tokens, the first {cut['used']:,} were read; "
                f"nothing from character {cut['cut_at']:,} on was seen"
            )
    used = max((result["truncation"]["used"] for result in answered["results"] if result["truncation"]), default=0)
    if query.max_tokens_per_doc is not None and query.max_tokens_per_doc < used:
        found.append(
            f"max_tokens_per_doc: documents were cut at {used:,} tokens, the model's own limit, "
            f"not at {query.max_tokens_per_doc:,}"
        )
    if query.model is not None and query.model not in served:
        found.append(f"model: {served[0]} answered, since none of that name is served; there is {', '.join(served)}")
    return found


def _document(item: object, loc: Loc) -> tuple[str, Loc]:
    """A document's text, and where it stands."""
    if isinstance(item, str):
        return item, loc
    if not isinstance(item, dict):
        raise InputError(f"must be a string, or an object with a text, not {json_type(item)}", loc)
    fields = Fields(item, ("text",), loc)
    return string(fields.required("text", "the document's text"), fields.at("text")), fields.at("text")


def error_body(found: HttpError) -> dict[str, Any]:
    """An error as this dialect's clients read it."""
    return {"message": found.message}


def _documented(*, with_documents: bool) -> dict[str, Any]:
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": ["query", "documents"],
        "properties": {
            "model": {
                "type": ["string", "null"],
                "description": "One of GET /v1/models; another name gives a warning.",
            },
            "query": {"type": "string", "description": "It is not kept in the label store."},
            "documents": {"type": "array", "items": _DOCUMENT, "minItems": 1},
            "top_n": {**_COUNT, "description": "Return only so many results."},
            "return_documents": {"type": ["boolean", "null"], "default": with_documents},
            "max_tokens_per_doc": {
                **_COUNT,
                "description": "Documents are cut at the model's own limit, with a warning.",
            },
            "max_chunks_per_doc": {"enum": [1, None]},
            "rank_fields": {"enum": [["text"], None]},
            "priority": {
                "type": ["integer", "null"],
                "description": "It changes nothing: requests are answered in turn.",
            },
        },
    }
    example = {"query": "card not received", "documents": ["Where is my card?", "I was charged twice."], "top_n": 1}
    return json_body(schema, example)
