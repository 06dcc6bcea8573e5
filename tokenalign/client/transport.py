"""What both clients share of httpx: addresses, time limits, and which of its errors means what."""

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tokenalign.client.answers import ModelInfo, parse_json
from tokenalign.client.errors import (
    InvalidAnswerError,
    NoAnswerError,
    ServiceConnectionError,
    ServiceError,
    ServiceTimeoutError,
    refusal,
)
from tokenalign.client.requests import Part, Question, base_url, headers
from tokenalign.client.retries import Clock, Deadline, PhaseLimits, Retries, retry_after_s
from tokenalign.errors import ConfigError, InputError

_BROKEN = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)

CLASSIFY, LABEL_SETS, MODEL, READY = "/v1/classify", "/v1/label-sets", "/v1/model", "/health/ready"


class Connection:
    """Address, key, limits and retries of a client; sends nothing itself.

    url: where the service is; a path in it is kept as a prefix
    timeout_s: for a whole call, with all its requests, retries and waits; None for no limit
    connect_timeout_s: for making a connection; read_timeout_s: how long nothing may arrive
    max_connections: kept open and used again, and at most so many
    clock, jitter: seconds that go up, and a number in [0, 1)
    Raises `ConfigError` naming the argument that can't be.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        timeout_s: float | None,
        connect_timeout_s: float,
        read_timeout_s: float,
        max_retries: int,
        max_connections: int,
        clock: Clock = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        for name, limit in {
            "timeout_s": timeout_s,
            "connect_timeout_s": connect_timeout_s,
            "read_timeout_s": read_timeout_s,
        }.items():
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name}: must be over 0; it is {limit}")
        if max_retries < 0:
            raise ConfigError(f"max_retries: must be at least 0; it is {max_retries}")
        if max_connections < 1:
            raise ConfigError(f"max_connections: must be at least 1; it is {max_connections}")
        self._url = base_url(url)
        self._headers = headers(api_key)
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._clock = clock
        self.limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self.retries = Retries(max_retries, jitter=jitter)
        self.info: ModelInfo | None = None  # of the last time it was asked for

    def deadline(self) -> Deadline:
        """The end of a call that begins now."""
        return Deadline(self._timeout_s, self._clock)

    def request(
        self, method: str, path: str, deadline: Deadline, body: bytes | None = None, accept: str | None = None
    ) -> httpx.Request:
        """One attempt's request; `ServiceTimeoutError` when there is no time left for one."""
        if deadline.left_s() <= 0:
            raise self.out_of_time()
        found = dict(self._headers)
        if body is not None:
            found["Content-Type"] = "application/json"
        if accept is not None:
            found["Accept"] = accept
        limits = PhaseLimits(deadline, self._connect_timeout_s, self._read_timeout_s)
        return httpx.Request(method, self._url + path, headers=found, content=body, extensions={"timeout": limits})

    def out_of_time(self) -> ServiceTimeoutError:
        """The error of a call that took all of its time."""
        return ServiceTimeoutError(f"no answer within {self._timeout_s} s (timeout_s)")

    def failure(self, error: httpx.HTTPError, *, begun: bool) -> ServiceError:
        """What an error of httpx's means; begun: a part of the answer had arrived."""
        words = str(error) or type(error).__name__
        where = self._shown_url()
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return ServiceTimeoutError(
                f"nothing from {where} in time ({words}): {self._read_timeout_s} s (read_timeout_s), "
                f"{self._timeout_s} s in all (timeout_s)"
            )
        if isinstance(error, httpx.DecodingError):
            return InvalidAnswerError(f"the answer of {where} can't be decoded: {words}")
        if isinstance(error, _BROKEN) and not begun:
            return NoAnswerError(f"no answer from {where}: {words}; check that the service runs and is at this address")
        return ServiceConnectionError(f"the exchange with {where} failed: {words}")

    def _shown_url(self) -> str:
        return str(httpx.URL(self._url).copy_with(userinfo=b""))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that is a success, read to its end."""

    status: int
    request_id: str | None
    body: bytes

    def json(self) -> dict[str, Any]:
        """The JSON object of the body; `InvalidAnswerError` where it is none."""
        return parse_json(self.body, self.request_id)


def request_id(response: httpx.Response) -> str | None:
    """The id by which the service's logs know the request."""
    found: str | None = response.headers.get("x-request-id")
    return found


def refused(response: httpx.Response, body: bytes) -> ServiceError | InputError:
    """The exception for an answer whose status is no success."""
    parsed: Any = None
    with contextlib.suppress(InvalidAnswerError):
        parsed = parse_json(body)
    sent = response.headers
    return refusal(
        response.status_code,
        parsed,
        body.decode("utf-8", "replace") or response.reason_phrase,
        request_id=request_id(response),
        retry_after_s=retry_after_s(sent.get("retry-after"), sent.get("date")),
    )


def label_set_path(set_id: str) -> str:
    """The path of one label set."""
    if not isinstance(set_id, str) or not set_id:
        raise InputError("must be the id that add_label_set gave", ("label_set",))
    return f"{LABEL_SETS}/{quote(set_id, safe='')}"


def whole(question: Question) -> list[Part] | None:
    """The only part of a question that needs no splitting, or has nothing to ask; None where the limits count."""
    if question.single or len(question.texts) == 1:
        return [Part(0, len(question.texts))]
    return None if question.texts else []
