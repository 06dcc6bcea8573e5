"""What can go wrong between a client and its service, as exceptions of the one family."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenalign.errors import InputError, Loc, TokenAlignError

MAX_SHOWN_CHARS = 200  # of an answer that is not the service's own, a proxy's page for example


class ServiceError(TokenAlignError):
    """The service, or something on the way to it, did not give an answer.

    status: the HTTP status, None where no answer came
    error_type, loc: as the service names them; loc is the path to the value at fault in what the caller gave
    request_id: the X-Request-ID of the answer, by which the service's logs are searched
    retry_after_s: after how long the service asks to be asked again
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        error_type: str | None = None,
        loc: Sequence[str | int] = (),
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.error_type = error_type
        self.loc: Loc = tuple(loc)
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        status = "" if self.status is None else f"{self.status}: "
        request = "" if self.request_id is None else f" (request {self.request_id})"
        return f"{status}{self.message}{request}"


class AuthenticationError(ServiceError):
    """401 or 403: no key, or one that is not accepted."""


class NotFoundError(ServiceError):
    """404: an unknown label set (error_type `unknown_label_set`), or no service at this URL."""


class RequestTooLargeError(ServiceError):
    """413: the body is over the service's limit."""


class OverloadedError(ServiceError):
    """429: the service has more to do than it can take on, and every attempt met that."""


class ServiceUnavailableError(ServiceError):
    """503: the service is starting, changing its model, or without its store of label sets."""


class ServiceDeadlineError(ServiceError):
    """504: the service did not finish within its own time limit."""


class ServiceTimeoutError(ServiceError, TimeoutError):
    """No answer within the client's own limits."""


class ServiceConnectionError(ServiceError, ConnectionError):
    """No connection, or one that broke."""


class NoAnswerError(ServiceConnectionError):
    """A `ServiceConnectionError` before any byte of an answer: to ask again is safe, as all requests are idempotent."""


class InvalidAnswerError(ServiceError):
    """An answer came that is none of this service's: no JSON, NaN, or other fields than agreed."""


_BY_STATUS: dict[int, type[ServiceError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    413: RequestTooLargeError,
    429: OverloadedError,
    503: ServiceUnavailableError,
    504: ServiceDeadlineError,
}

# For errors that come after a stream began, whose status is long gone.
_STATUS_OF = {
    "invalid_input": 422,
    "body_too_large": 413,
    "overloaded": 429,
    "deadline_exceeded": 504,
    "not_ready": 503,
    "unknown_label_set": 404,
    "label_sets_unavailable": 503,
    "numerical": 500,
    "internal": 500,
}


def refusal(
    status: int | None,
    body: object,
    text: str = "",
    *,
    request_id: str | None = None,
    retry_after_s: float | None = None,
) -> ServiceError | InputError:
    """The exception for an answer that is an error; an `InputError`, caused by the `ServiceError`, for a 422.

    status: None for an error within a stream, whose type tells it
    body: the parsed JSON of the answer, or None where it is none; text: what came instead
    """
    fields: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    error_type = fields["error_type"] if isinstance(fields.get("error_type"), str) else None
    loc = _loc(fields.get("loc"))
    if status is None:
        status = _STATUS_OF.get(error_type or "", 500)
    message = fields["error"] if isinstance(fields.get("error"), str) else _foreign(text)
    error = _BY_STATUS.get(status, ServiceError)(
        message, status=status, error_type=error_type, loc=loc, request_id=request_id, retry_after_s=retry_after_s
    )
    if status != 422:
        return error
    refused = InputError(_without_path(message, loc), loc)
    refused.__cause__ = error
    return refused


def moved(error: InputError, start: int, *, labels_per_text: bool = False) -> InputError:
    """The error of a part of the caller's texts, whose first one is the caller's number `start`."""
    found = InputError(error.message, moved_loc(error.loc, start, labels_per_text=labels_per_text))
    found.__cause__ = error.__cause__
    return found


def moved_loc(loc: Loc, start: int, *, labels_per_text: bool = False) -> Loc:
    """A place within a part of the texts as a place within all of them."""
    counted = {"texts", "labels"} if labels_per_text else {"texts"}
    if len(loc) > 1 and loc[0] in counted and isinstance(loc[1], int):
        return (loc[0], loc[1] + start, *loc[2:])
    return loc


def _loc(value: object) -> Loc:
    if not isinstance(value, list):
        return ()
    return tuple(part for part in value if isinstance(part, (str, int)))


def _without_path(message: str, loc: Loc) -> str:
    """The message without the place that it begins with, since an `InputError` puts its own in front."""
    path = str(InputError("", loc)).removesuffix(" ") if loc else ""
    return message.removeprefix(path).lstrip() if path else message


def _foreign(text: str) -> str:
    shown = " ".join(text.split())
    if not shown:
        return "the answer is an error without a word; something between here and the service may have given it"
    cut = shown if len(shown) <= MAX_SHOWN_CHARS else shown[: MAX_SHOWN_CHARS - 1] + "…"
    return f"the answer is no error of the service's own, something in between may have given it: {cut}"
