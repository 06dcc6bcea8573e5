"""Answers that go out line by line, as they come: newline-delimited JSON."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from deploy.http.answers import told

NDJSON = "application/x-ndjson"


def wants_lines(request: Request) -> bool:
    """Whether the caller names newline-delimited JSON among what it accepts."""
    accepted = ",".join(request.headers.getlist("accept")).lower().split(",")
    return any(entry.partition(";")[0].strip() == NDJSON for entry in accepted)


async def lines_response(values: AsyncGenerator[dict[str, Any], None]) -> "LinesResponse":
    """The response of which each value is a line, once the first value is there.

    Raises what the first value raises. What a later one raises is a line of the form of all errors, and the last.
    """
    first = await anext(values)
    return LinesResponse(first, values)


class LinesResponse(StreamingResponse):
    """Sends lines until there are no more or the caller leaves; then nothing more is computed for it."""

    def __init__(self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> None:
        self._lines, self._rest = _lines(first, rest), rest
        super().__init__(self._lines, media_type=NDJSON)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all of it, unless the connection ends before."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.wait({sending, leaving})
            await self._lines.aclose()
            await self._rest.aclose()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        with contextlib.suppress(OSError):  # the connection ended under us
            await self.stream_response(send)


async def _lines(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    yield _line(first)
    try:
        async for value in rest:
            yield _line(value)
    except Exception as error:  # noqa: BLE001  the table has a row for anything
        yield _line(told(error).body())


def _line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
