"""Around every request: its id, its span, and its time as a metric."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.http.answers import error_response
from deploy.metrics import REQUEST_SECONDS, REQUESTS_IN_PROGRESS, StageTimes
from deploy.request_context import RequestContext, answering, request_id_of
from deploy.telemetry import NoSink, Reading, Sink
from deploy.tracing import NO_TRACER, Span, Tracer

REQUEST_ID = "X-Request-ID"
CALLER_LEFT = 499
UNKNOWN_ROUTE = "other"
PROBES = ("/health/live", "/health/ready")
"""Ends of paths that are asked every few seconds, and not worth a trace."""


@dataclass(slots=True)
class Watch:
    """Who is told of requests.

    names_requests: whether answers get the header X-Request-ID; False where the server in front gives it to them
    """

    sink: Sink = field(default_factory=NoSink)
    tracer: Tracer = NO_TRACER
    names_requests: bool = True
    stages: StageTimes = field(default_factory=StageTimes)
    in_progress: int = 0

    def readings(self) -> Iterator[Reading]:
        """What is counted besides the times of requests."""
        yield Reading(REQUESTS_IN_PROGRESS, self.in_progress)
        yield from self.stages.readings()


class Watched:
    """ASGI middleware: what is inside answers a request that has an id, and is watched."""

    def __init__(self, app: ASGIApp, watch: Watch, routes: frozenset[str]) -> None:
        """routes: paths that are served, which a metric may name; of those with parameters the pattern"""
        self._app = app
        self._watch = watch
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watch, started = self._watch, time.perf_counter()
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get(REQUEST_ID))
        status: int | None = None

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if watch.names_requests:
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        tracer = NO_TRACER if scope["path"].endswith(PROBES) else watch.tracer
        watch.in_progress += 1
        with tracer.request("request", headers, request_id) as span:
            context = RequestContext(request_id, span, watch.stages, started)
            try:
                with answering(context):
                    await self._answer(scope, receive, tell, lambda: status is not None)
                    context.end()
            finally:
                watch.in_progress -= 1
                route, ended_with = self._route(scope), status or CALLER_LEFT
                _describe(span, scope["method"], route, ended_with)
                seconds = time.perf_counter() - started
                watch.sink.observe(REQUEST_SECONDS, seconds, {"route": route, "status": str(ended_with)})

    async def _answer(self, scope: Scope, receive: Receive, send: Send, begun: Callable[[], bool]) -> None:
        """What is inside, or the answer to an error that it let through. Half an answer is left to the server."""
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if begun():
                raise
            await error_response(error)(scope, receive, send)

    def _route(self, scope: Scope) -> str:
        """The route as it is declared: a few names, whatever paths callers make up."""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._routes:
            return path
        declared: str = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
        return declared if declared in self._routes else UNKNOWN_ROUTE


def _describe(span: Span, method: str, route: str, status: int) -> None:
    """Names the span, with the attributes that OpenTelemetry has for requests."""
    span.rename(f"{method} {route}")
    span.set("http.request.method", method)
    span.set("http.route", route)
    span.set("http.response.status_code", status)
    if status >= 500:
        span.fail(str(status))
