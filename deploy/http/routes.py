"""The HTTP application: native routes over a `Service`, every error through the one table."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deploy.http.answers import answer, error_response, json_response
from deploy.http.cors import allow_origins
from deploy.http.dialects import hugging_face, open_inference, rerank_apis, text_embeddings_inference
from deploy.http.dialects.seam import Native
from deploy.http.errors import HttpError
from deploy.http.gate import Gate, document_keys, guard
from deploy.http.limits import SLOW, parse_json_object, read_body
from deploy.http.ndjson import NDJSON, lines_response, wants_lines
from deploy.http.page import Page
from deploy.http.schemas import (
    ClassifyQuery,
    ClassifyRequest,
    ClassifyResponse,
    ErrorResponse,
    LabelSetDefinitionSchema,
    LabelSetRequest,
    LabelSetSchema,
    ModelsSchema,
    label_set_id,
    parse_classify,
    parse_label_set,
)
from deploy.http.tenants import Tenants
from deploy.http.watch import Watch, Watched
from deploy.label_sets import Definition, UnknownLabelSetError
from deploy.request_context import lap
from deploy.settings import LimitSettings
from tokenalign.labels import LabelSet

_DESCRIPTION = """Classify text against label descriptions that come with the request.

Each label token looks for its best match among the text's tokens; `explain` shows which words matched."""

# Documented, but not checked by FastAPI, whose errors have another shape.
_SET_ID = {"parameters": [{"name": "set_id", "in": "path", "required": True, "schema": {"type": "string"}}]}

_LINES = {
    "type": "string",
    "description": "With Accept: application/x-ndjson: a line for each text as soon as it is scored, its result with "
    "its `index` among the texts; then one with warnings, model and usage. An error after the first line is the last.",
}


class Service(Protocol):
    """What the routes need of the ingress."""

    def check_room(self) -> None:
        """Raises `QueueFull` where a request of one text would be refused."""

    async def classify(self, query: ClassifyQuery) -> dict[str, Any]:
        """The JSON answer to a good request."""

    def classify_stream(self, query: ClassifyQuery) -> AsyncGenerator[dict[str, Any], None]:
        """The result of each text as soon as it is there, with its index, and at last what all share."""

    async def add_label_set(
        self, labels: LabelSet, name: str | None, *, tenant: str | None
    ) -> tuple[dict[str, Any], bool]:
        """The JSON answer to who posts a label set, whose labels are encoded by then, and whether the set is new."""

    async def label_set(self, set_id: str, *, tenant: str | None) -> Definition:
        """The label set with that id; else `UnknownLabelSetError` or `LabelSetsUnavailableError`."""

    async def delete_label_set(self, set_id: str, *, tenant: str | None) -> None:
        """Returns once the store has no label set with that id."""

    def logit_scale(self, model: str) -> float:
        """What a mean of cosines is multiplied with to be a logit of the head with that name."""

    def predict_label_set(self) -> str | None:
        """The id of the label set that the settings name for `/predict`, None where they name none."""

    async def ready(self) -> None:
        """Returns when requests can be answered; else raises `NotReadyError`."""

    def model_info(self) -> dict[str, Any]:
        """What is served, for `GET /v1/model`; `NotReadyError` before it is known."""

    def models_info(self) -> dict[str, Any]:
        """The heads that are served, for `GET /v1/models`; `NotReadyError` before they are known."""


def build_http_app(
    service: Service,
    limits: LimitSettings,
    tenants: Tenants | None = None,
    *,
    watch: Watch | None = None,
    gate: Gate | None = None,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """The ASGI application; without `tenants` all callers share what is cached and kept.

    watch: who is told of requests; gate: who may ask, all without one; cors_origins: whose pages may ask besides ours
    """
    tenants, gate = tenants or Tenants(), gate or Gate()
    page = Page.load()
    # No ReDoc: its page shows a picture from its maker's host.
    app = FastAPIOffline(redoc_url=None, title="tokenalign", version="1", description=_DESCRIPTION)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)

    @app.get("/", include_in_schema=False)
    async def home() -> Response:
        return page.response()

    @app.get("/health/live", summary="Whether this process runs", responses=_answers(200))
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready", summary="Whether requests can be answered", responses=_answers(200, 503))
    async def ready() -> Response:
        return await answer(_ready(service))

    @app.get("/v1/model", summary="What is served", responses=_answers(200, 503))
    async def model() -> Response:
        return await answer(_model(service))

    @app.get("/v1/models", summary="All heads that are served", response_model=ModelsSchema, responses=_answers(503))
    async def models() -> Response:
        return await answer(_models(service))

    @app.post(
        "/v1/classify",
        summary="Score texts against labels",
        response_model=ClassifyResponse,
        responses={
            200: {"content": {NDJSON: {"schema": _LINES}}},
            **_answers(404, 413, 422, 429, 500, 503, 504),
        },
        openapi_extra=_body(ClassifyRequest),
    )
    async def classify(request: Request) -> Response:
        return await answer(_classify(service, request, limits, tenants.of(request)))

    # FastAPI documents it; it is served without FastAPI's own work, of which a route that reads its body needs nothing.
    app.router.routes.insert(0, Route("/v1/classify", classify, methods=["POST"], include_in_schema=False))

    @app.post(
        "/v1/label-sets",
        summary="Keep labels under an id, encode them, and say what is wrong with them",
        description="Answers once the labels are encoded. The id is a hash of the labels, the same in any order.",
        status_code=201,
        response_model=LabelSetSchema,
        responses={
            200: {"model": LabelSetSchema, "description": "The set was known; it keeps its name and order."},
            **_answers(413, 422, 500, 503, 504),
        },
        openapi_extra=_body(LabelSetRequest),
    )
    async def add_label_set(request: Request) -> Response:
        return await answer(_add_label_set(service, request, limits, tenants.of(request)))

    @app.get(
        "/v1/label-sets/{set_id}",
        summary="The labels under an id",
        response_model=LabelSetDefinitionSchema,
        responses=_answers(404, 500, 503),
        openapi_extra=_SET_ID,
    )
    async def label_set(request: Request) -> Response:
        return await answer(_label_set(service, request.path_params["set_id"], tenants.of(request)))

    @app.delete(
        "/v1/label-sets/{set_id}",
        summary="Forget the labels under an id",
        description="204 whether or not there was such a set. Other replicas may know it for a few seconds more "
        "(label_sets.memory_ttl_s).",
        status_code=204,
        response_class=Response,
        responses=_answers(409, 500, 503),
        openapi_extra=_SET_ID,
    )
    async def delete_label_set(request: Request) -> Response:
        return await answer(_delete_label_set(service, request.path_params["set_id"], tenants.of(request)))

    guard(app.routes, gate)
    for dialect in (hugging_face, text_embeddings_inference, rerank_apis, open_inference):
        known = len(app.routes)
        dialect.add_routes(app, Native(service, limits, tenants))
        guard(app.routes[known:], gate, dialect.error_body)
    if gate.asks_for_keys:
        document_keys(app)

    if cors_origins:
        allow_origins(app, cors_origins)
    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", None)) is not None)
    app.add_middleware(Watched, watch=watch or Watch(), routes=paths)
    return app


async def _classify(
    service: Service, request: Request, limits: LimitSettings, tenant: str | None
) -> dict[str, Any] | Response:
    service.check_room()  # before a body is read: under overload most are refused
    sent = await read_body(request, limits)
    lap("read")
    body = parse_json_object(sent)
    lap("parse")
    set_id = label_set_id(body)
    known = None if set_id is None else await _known_labels(service, set_id, tenant)
    query = replace(parse_classify(body, limits, known), tenant=tenant)
    lap("validate")
    if wants_lines(request):
        return await lines_response(service.classify_stream(query))
    return await service.classify(query)


async def _known_labels(service: Service, set_id: str, tenant: str | None) -> LabelSet:
    try:
        return (await service.label_set(set_id, tenant=tenant)).labels
    except UnknownLabelSetError as error:
        raise UnknownLabelSetError(set_id, ("label_set",)) from error


async def _add_label_set(service: Service, request: Request, limits: LimitSettings, tenant: str | None) -> Response:
    body = parse_json_object(await read_body(request, limits))
    known, new = await service.add_label_set(*parse_label_set(body, limits), tenant=tenant)
    where = {"Location": f"label-sets/{known['id']}"}  # relative to this path, which may have a prefix
    return json_response(known, 201 if new else 200, where)


async def _label_set(service: Service, set_id: str, tenant: str | None) -> dict[str, Any]:
    return {"id": set_id, **(await service.label_set(set_id, tenant=tenant)).json()}


async def _delete_label_set(service: Service, set_id: str, tenant: str | None) -> Response:
    await service.delete_label_set(set_id, tenant=tenant)
    return Response(status_code=204)


async def _ready(service: Service) -> dict[str, str]:
    await service.ready()
    return {"status": "ready"}


async def _model(service: Service) -> dict[str, Any]:
    return service.model_info()


async def _models(service: Service) -> dict[str, Any]:
    return service.models_info()


async def _on_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in our shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = (error.headers if isinstance(error, HTTPException) else None) or {}
    posts, gets = "/v1/classify /v1/label-sets", "/v1/model /v1/models /health/live /health/ready /docs"
    paths = ", ".join([f"POST {path}" for path in posts.split()] + [f"GET {path}" for path in gets.split()])
    words = {
        404: ("not_found", f"nothing is at this path; there is {paths}"),
        405: ("method_not_allowed", f"{request.method} is not served at this path; there is {paths}"),
    }
    error_type, message = words.get(status, ("http", "the request could not be served"))
    return JSONResponse(HttpError(status, error_type, message).body(), status, headers=dict(headers))


def _body(request: type[BaseModel]) -> dict[str, Any]:
    """The documentation of a body that is read by us, not by FastAPI."""
    schema = request.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meaning = {
        404: "No label set has this id, so post its labels again; or no model has this name.",
        408: SLOW,
        409: "The label set is named in the settings.",
        413: "The body is over the limit.",
        422: "A value of the request is not acceptable; `loc` names it.",
        429: "Overloaded; see Retry-After.",
        500: "The service failed; it was logged.",
        503: "Not ready, changing to another model, or without the store of label sets; see Retry-After.",
        504: "No answer within the time limit.",
    }
    read = (408,) if 413 in statuses else ()
    return {s: {"model": ErrorResponse, "description": meaning[s]} for s in sorted((*read, *statuses)) if s != 200}
