"""The request that is being answered: its id, where its time goes, and its span."""

import re
import time
import uuid
from contextvars import ContextVar

from deploy.metrics import StageTimes
from deploy.tracing import Span
from deploy.trail import Trail, working_for

ID_FORM = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
"""What a caller's id may be: printable ASCII without spaces, of 128 characters at most."""


class RequestContext:
    """What is known of a request besides what it asks.

    stages: where its time is added up, together with others'
    """

    __slots__ = ("_in_stages", "_lapped_at", "_stages", "request_id", "span")

    def __init__(self, request_id: str, span: Span, stages: StageTimes, started: float) -> None:
        """started: `time.perf_counter()` when the request came"""
        self.request_id = request_id
        self.span = span
        self._stages = stages
        self._lapped_at = started
        self._in_stages = False

    @property
    def trail(self) -> Trail:
        """What work for this request carries."""
        return self.span.trail

    def lap(self, stage: str) -> None:
        """Says that a stage ends now; it began where the one before ended."""
        now = time.perf_counter()
        self._stages.add(stage, now - self._lapped_at)
        self._lapped_at, self._in_stages = now, True
        self.span.event(stage)

    def end(self) -> None:
        """Says that all is written. A request without stages before, such as a probe's, has none now."""
        if self._in_stages:
            self.lap("write")


_current: ContextVar[RequestContext | None] = ContextVar("tokenalign_request", default=None)


class answering(working_for):  # noqa: N801  as there
    """Makes it the current request for all that is called or started inside its `with`."""

    __slots__ = ("_context", "_request_token")

    def __init__(self, context: RequestContext) -> None:
        super().__init__(context.trail)
        self._context = context

    def __enter__(self) -> None:
        super().__enter__()
        self._request_token = _current.set(self._context)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._request_token)
        super().__exit__()


def current_request() -> RequestContext | None:
    """The request that is being answered here, None outside of one."""
    return _current.get()


def lap(stage: str) -> None:
    """`RequestContext.lap` of the current request; nothing outside of one."""
    if (context := _current.get()) is not None:
        context.lap(stage)


def request_id_of(given: str | None) -> str:
    """The id that a caller gave for its request where it has the form of one, else a new one."""
    return given if given is not None and ID_FORM.fullmatch(given) else uuid.uuid4().hex
