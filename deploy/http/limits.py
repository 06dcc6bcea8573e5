"""Reading a request's body: bounded while it streams, then JSON, with errors that say where."""

import asyncio
import json
import reprlib
from collections import Counter
from typing import Any

from starlette.requests import Request

from deploy.http.errors import BodyTooLargeError, SlowBodyError
from deploy.settings import LimitSettings
from tokenalign.errors import InputError

MAX_NUMBER_DIGITS = 4_300  # Python itself reads no longer whole number
SLOW = "The body took longer than limits.max_body_s to arrive."
"""What documentation says of a 408."""

_MAX_LENGTH_DIGITS = 18  # of a Content-Length that is taken for a number at all


async def read_body(request: Request, limits: LimitSettings) -> bytes:
    """The whole body.

    `BodyTooLargeError` as soon as it is known to have too many bytes, `SlowBodyError` when it takes too long to arrive,
    `InputError` for one that is compressed.
    """
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
        raise InputError(f"the body is compressed ({encoding[:20]!a}), which is not read here; send it as it is")
    _check_declared(request, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.max_body_s):
            return await _collect(request, limits.max_body_bytes)
    except TimeoutError as error:
        raise SlowBodyError(
            f"the body did not arrive within {limits.max_body_s:g} s (limits.max_body_s); "
            "send it without pauses, or fewer texts at a time"
        ) from error


def _check_declared(request: Request, max_body_bytes: int) -> None:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) > _MAX_LENGTH_DIGITS:
        raise _too_large("more", max_body_bytes)
    if declared.isdecimal() and int(declared) > max_body_bytes:
        raise _too_large(f"{int(declared):,}", max_body_bytes)


async def _collect(request: Request, max_body_bytes: int) -> bytes:
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
        value = json.loads(
            body, parse_constant=_refuse_constant, parse_int=_parse_int, object_pairs_hook=_object_of_distinct_keys
        )
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"the body is no UTF-8: {error.reason} at byte {error.start}; encode it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise InputError(
            f"the body is no JSON: {error.msg} at line {error.lineno} column {error.colno}; send a JSON object"
        ) from error
    except RecursionError as error:
        raise InputError("the body is nested too deep to be read; send a flat JSON object") from error
    if not isinstance(value, dict):
        raise InputError(f"the body must be a JSON object, not {json_type(value)}; send one with text and labels")
    return value


def json_type(value: object) -> str:
    """What a parsed value was in JSON, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _refuse_constant(name: str) -> None:
    raise InputError(f"the body is no JSON: {name} is no JSON number; leave it out or send a number")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_DIGITS:
        raise InputError(
            f"a number has {len(digits):,} digits, at most {MAX_NUMBER_DIGITS:,} are read; send a shorter one"
        )
    return int(digits)


def _object_of_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; JSON leaves open which of two equal keys counts, and either choice would drop a value in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise InputError(f"key {reprlib.repr(twice)} is given twice in one object; send it once")
    return found


def _too_large(size: str, max_body_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {size} bytes, at most {max_body_bytes:,} allowed (limits.max_body_bytes); "
        "send fewer texts at a time"
    )
