"""What leads from work back to whoever asked for it, across processes too; for logs and traces, not for the work."""

from collections.abc import Iterable
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


class working_for:  # noqa: N801  read as a verb; no generator, whose `with` takes twice as long
    """Whatever is called or started inside its `with` is work for the trail's owners."""

    __slots__ = ("_token", "_trail")

    def __init__(self, trail: Trail) -> None:
        self._trail = trail

    def __enter__(self) -> None:
        self._token = _current.set(self._trail)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def current_trail() -> Trail:
    """Whose work is done here; `NO_TRAIL` for work that nobody waits for."""
    return _current.get()


def request_ids_of(trails: Iterable[Trail]) -> tuple[str, ...]:
    """The requests of all trails, each once, in order of first appearance."""
    return tuple(dict.fromkeys(request_id for trail in trails for request_id in trail.request_ids))
