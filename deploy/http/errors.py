"""One table from exceptions to HTTP: status, type, and what the caller is told."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.batching import BatcherClosed, DeadlineExceeded, OversizedRequestError, QueueFull
from deploy.http.quotas import QuotaError
from deploy.label_sets import LabelSetsUnavailableError, PinnedLabelSetError, UnknownLabelSetError
from deploy.request_context import current_request
from deploy.wire import ReplicaLostError
from tokenalign.errors import (
    DeviceMemoryError,
    FingerprintMismatchError,
    InputError,
    Loc,
    NumericalError,
    TokenAlignError,
)


class BodyTooLargeError(TokenAlignError):
    """The body of a request is over the limit."""


class SlowBodyError(TokenAlignError):
    """The body of a request took too long to arrive."""


class UnauthenticatedError(TokenAlignError):
    """A request came without a key, or with none that is known."""


class NotLocalError(TokenAlignError):
    """A service without keys was asked from elsewhere."""


class NotServedError(TokenAlignError):
    """What a request names is not served here."""


class UnknownModelError(TokenAlignError):
    """A request asks for a head by a name that none has."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name, tuple(known))
        self.name, self.known = name, tuple(known)

    def __str__(self) -> str:
        shown = ", ".join(self.known[:20]) + (", …" if len(self.known) > 20 else "")
        return f"model: none is called {reprlib.repr(self.name)}; there is {shown} (GET /v1/models lists them)"


class NotReadyError(TokenAlignError):
    """The application can't answer yet, or not at this moment."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as it goes out: `{"error", "error_type", "loc", "request_id"}` with a status and headers."""

    status: int
    error_type: str
    message: str
    loc: Loc = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer; with the id of the request that is being answered, if there is one."""
        found = {"error": self.message, "error_type": self.error_type, "loc": list(self.loc)}
        request = current_request()
        return found if request is None else {**found, "request_id": request.request_id}


_BUSY = "the service is overloaded: {error}; send again after the time in Retry-After, or send fewer requests at once"
_ROLLOUT = "the service is changing to another model at this moment; send the request again"
_LOST = "a replica ended while it worked on this request, twice; send the request again"
_NUMBERS = "the model gave no finite numbers for this request, so there is no answer; it was logged, report it"
_MEMORY = "the encoder had no memory left for this request; send it again, or shorter texts"
_INTERNAL = "the service failed on this request; it was logged, and the request may be sent again"


def to_http(error: BaseException) -> HttpError:
    """The HTTP form of an exception; anything unknown is a 500 that tells nothing of its inside."""
    match error:
        case InputError():
            return HttpError(422, "invalid_input", str(error), error.loc)
        case NotServedError():
            return HttpError(404, "not_served", str(error))
        case UnknownModelError():
            return HttpError(404, "unknown_model", str(error), ("model",))
        case BodyTooLargeError():
            return HttpError(413, "body_too_large", str(error))
        case SlowBodyError():
            return HttpError(408, "body_too_slow", str(error), headers={"Connection": "close"})
        case UnauthenticatedError():
            return HttpError(401, "unauthenticated", str(error), headers={"WWW-Authenticate": "Bearer"})
        case NotLocalError():
            return HttpError(403, "not_local", str(error))
        case QuotaError():
            return HttpError(429, "over_quota", str(error), headers={"Retry-After": _seconds(error.retry_after_s)})
        case OversizedRequestError():
            return HttpError(422, "invalid_input", str(error), ("texts",))
        case QueueFull():
            retry = {"Retry-After": _seconds(error.retry_after_s)}
            return HttpError(429, "overloaded", _BUSY.format(error=error), headers=retry)
        case DeadlineExceeded():
            return HttpError(504, "deadline_exceeded", str(error))
        case FingerprintMismatchError():
            return HttpError(503, "not_ready", _ROLLOUT, headers={"Retry-After": "1"})
        case ReplicaLostError():
            return HttpError(503, "not_ready", _LOST, headers={"Retry-After": "1"})
        case UnknownLabelSetError():
            return HttpError(404, "unknown_label_set", str(error), error.loc)
        case LabelSetsUnavailableError():
            retry = {"Retry-After": "1"} if error.passing else {}
            return HttpError(503, "label_sets_unavailable", str(error), headers=retry)
        case PinnedLabelSetError():
            return HttpError(409, "label_set_in_settings", str(error))
        case NotReadyError() | BatcherClosed():
            return HttpError(503, "not_ready", str(error), headers={"Retry-After": "1"})
        case DeviceMemoryError():
            return HttpError(503, "out_of_memory", _MEMORY, headers={"Retry-After": "1"})
        case NumericalError():
            return HttpError(500, "numerical", _NUMBERS)
        case _:
            return HttpError(500, "internal", _INTERNAL)


def _seconds(wait_s: float) -> str:
    """Of Retry-After: whole ones, and not too few."""
    return str(max(1, math.ceil(wait_s)))
