"""Reading a request's body: bounded while it streams, then JSON, with errors that say where."""

import json
from typing import Any

from starlette.requests import Request

from deploy.http.errors import BodyTooLargeError
from tokenalign.errors import InputError


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body; `BodyTooLargeError` as soon as it is known to exceed `max_body_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_body_bytes:
        raise _too_large(f"{int(declared):,}", max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_body_bytes:
            raise _too_large("more", max_body_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; `InputError` saying what is wrong and where.

    Python's own parser, since it lets a lone surrogate through to the check that names the field it stands in.
    """
    if not body:
        raise InputError("the body is empty; send a JSON object")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(f"the body is no UTF-8: {error.reason} at byte {error.start}; encode it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"the body is no JSON: {error.msg} at line {error.lineno} column {error.colno}; send a JSON object"
        ) from error
    except RecursionError as error:
        raise InputError("the body is nested too deep to be read; send a flat JSON object") from error
    except ValueError as error:
        raise InputError(f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _too_large(size: str, max_body_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {size} bytes, at most {max_body_bytes:,} allowed (limits.max_body_bytes); "
        "send fewer texts at a time"
    )
