"""The HTTP application: native routes over a `Service`, every error through the one table."""

import json
import logging
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from deploy.http.errors import HttpError, NotReadyError, to_http
from deploy.http.limits import parse_json_object, read_body
from deploy.http.schemas import ClassifyQuery, ClassifyRequest, ClassifyResponse, ErrorResponse, parse_classify
from deploy.settings import LimitSettings

logger = logging.getLogger(__name__)

_DESCRIPTION = """Classify text against label descriptions that come with the request.

Each label token looks for its best match among the text's tokens; `explain` shows which words matched."""


class Service(Protocol):
    """What the routes need of the ingress."""

    async def classify(self, query: ClassifyQuery) -> dict[str, Any]:
        """The JSON answer to a good request."""

    async def ready(self) -> None:
        """Returns when requests can be answered; else raises `NotReadyError`."""

    def model_info(self) -> dict[str, Any]:
        """What is served, for `GET /v1/model`; `NotReadyError` before it is known."""


def build_http_app(service: Service, limits: LimitSettings) -> FastAPI:
    """The ASGI application."""
    # No ReDoc: its page shows a picture from its maker's host.
    app = FastAPIOffline(redoc_url=None, title="tokenalign", version="1", description=_DESCRIPTION)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)

    @app.get("/", include_in_schema=False)
    async def home() -> RedirectResponse:
        return RedirectResponse("docs")

    @app.get("/health/live", summary="Whether this process runs", responses=_answers(200))
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready", summary="Whether requests can be answered", responses=_answers(200, 503))
    async def ready() -> Response:
        return await _answer(_ready(service))

    @app.get("/v1/model", summary="What is served", responses=_answers(200, 503))
    async def model() -> Response:
        return await _answer(_model(service))

    @app.post(
        "/v1/classify",
        summary="Score texts against labels",
        response_model=ClassifyResponse,
        responses=_answers(413, 422, 429, 500, 503, 504),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": ClassifyRequest.model_json_schema()}},
            }
        },
    )
    async def classify(request: Request) -> Response:
        return await _answer(_classify(service, request, limits))

    return app


async def _classify(service: Service, request: Request, limits: LimitSettings) -> dict[str, Any]:
    body = await read_body(request, limits.max_body_bytes)
    return await service.classify(parse_classify(parse_json_object(body), limits))


async def _ready(service: Service) -> dict[str, str]:
    await service.ready()
    return {"status": "ready"}


async def _model(service: Service) -> dict[str, Any]:
    return service.model_info()


async def _answer(work: Any) -> Response:
    """The JSON of what `work` gives, or of its error. Errors are answered here, since a middleware would log them."""
    try:
        # NaN is no JSON: better an error than an answer that strict readers can't read.
        return Response(json.dumps(await work, ensure_ascii=False, allow_nan=False), media_type="application/json")
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Exception as error:  # noqa: BLE001  the table has a row for anything
        return _error_response(error)


def _error_response(error: Exception) -> Response:
    found = to_http(error)
    if found.status == 500:
        logger.error("a request failed: %s", type(error).__name__, exc_info=error)
    return JSONResponse(found.body(), found.status, headers=dict(found.headers))


async def _on_error(_: Request, error: Exception) -> Response:
    return _error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in our shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = (error.headers if isinstance(error, HTTPException) else None) or {}
    paths = "POST /v1/classify, GET /v1/model, GET /health/live, GET /health/ready, GET /docs"
    words = {
        404: ("not_found", f"nothing is at this path; there is {paths}"),
        405: ("method_not_allowed", f"{request.method} is not served at this path; there is {paths}"),
    }
    error_type, message = words.get(status, ("http", "the request could not be served"))
    return JSONResponse(HttpError(status, error_type, message).body(), status, headers=dict(headers))


def _answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meaning = {
        413: "The body is over the limit.",
        422: "A value of the request is not acceptable; `loc` names it.",
        429: "Overloaded; see Retry-After.",
        500: "The service failed; it was logged.",
        503: "Not ready, or changing to another model; see Retry-After.",
        504: "No answer within the time limit.",
    }
    return {s: {"model": ErrorResponse, "description": meaning[s]} for s in statuses if s != 200}


__all__ = ["NotReadyError", "Service", "build_http_app"]
