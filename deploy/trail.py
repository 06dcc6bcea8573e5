"""What leads from work back to whoever asked for it, across processes too; for logs and traces, not for the work."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trail:
    """Whose work it is.

    request_ids: of the requests that have a part in it
    traceparent, tracestate: of the span that it is part of, as W3C Trace Context writes them; "" where none is recorded
    """

    request_ids: tuple[str, ...] = ()
    traceparent: str = ""
    tracestate: str = ""


NO_TRAIL = Trail()

_current: ContextVar[Trail] = ContextVar("tokenalign_trail", default=NO_TRAIL)


@contextmanager
def working_for(trail: Trail) -> Iterator[None]:
    """Whatever is called or started inside is work for the trail's owners."""
    token = _current.set(trail)
    try:
        yield
    finally:
        _current.reset(token)


def current_trail() -> Trail:
    """Whose work is done here; `NO_TRAIL` for work that nobody waits for."""
    return _current.get()


def request_ids_of(trails: Iterable[Trail]) -> tuple[str, ...]:
    """The requests of all trails, each once, in order of first appearance."""
    return tuple(dict.fromkeys(request_id for trail in trails for request_id in trail.request_ids))
