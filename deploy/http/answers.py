"""From work to response: JSON out, and every error through the one table, in the shape of whoever asked."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from deploy.http.errors import HttpError, to_http

logger = logging.getLogger(__name__)

ErrorShape = Callable[[HttpError], dict[str, Any]]


async def answer(work: Awaitable[Any], shape: ErrorShape = HttpError.body) -> Response:
    """What `work` gives, or its error, as a response. Errors are answered here, since a middleware would log them."""
    try:
        given = await work
        return given if isinstance(given, Response) else json_response(given)
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Exception as error:  # noqa: BLE001  the table has a row for anything
        return error_response(error, shape)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The response with `value` as JSON. Numbers must be finite, as all scores are: NaN would become null."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def error_response(error: Exception, shape: ErrorShape = HttpError.body) -> Response:
    """The response to who caused, or met, an error; what nobody foresaw is logged."""
    found = told(error)
    return JSONResponse(shape(found), found.status, headers=dict(found.headers))


def told(error: Exception) -> HttpError:
    """What the caller is told of an error; what nobody foresaw is logged."""
    found = to_http(error)
    if found.status == 500:
        logger.error("a request failed: %s", type(error).__name__, exc_info=error)
    return found
