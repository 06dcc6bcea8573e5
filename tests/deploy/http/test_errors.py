"""The table of errors: every exception has one status and type, and says nothing of the inside."""

import json
from typing import Any

import pytest

from deploy.batching import BatcherClosed, DeadlineExceeded, DispatchError, OversizedRequestError, QueueFull
from deploy.http.errors import (
    BodyTooLargeError,
    HttpError,
    NotLocalError,
    NotReadyError,
    SlowBodyError,
    UnauthenticatedError,
    to_http,
)
from deploy.http.quotas import QuotaError
from deploy.label_cache import LabelEncodingError, StoreError
from deploy.wire import ReplicaLostError
from tokenalign.errors import (
    BackboneError,
    ConfigError,
    DeviceMemoryError,
    FingerprintMismatchError,
    InputError,
    NumericalError,
)


@pytest.mark.parametrize(
    ("error", "status", "error_type", "words"),
    [
        (InputError("is empty", ("texts", 3)), 422, "invalid_input", "texts[3]: is empty"),
        (BodyTooLargeError("17 bytes"), 413, "body_too_large", "17 bytes"),
        (SlowBodyError("not within 3 s"), 408, "body_too_slow", "not within 3 s"),
        (UnauthenticatedError("no key"), 401, "unauthenticated", "no key"),
        (NotLocalError("from elsewhere"), 403, "not_local", "from elsewhere"),
        (QuotaError("too often", 1.2), 429, "over_quota", "too often"),
        (OversizedRequestError("3 items"), 422, "invalid_input", "3 items"),
        (QueueFull(2, 30, 2, 100, 1.5), 429, "overloaded", "max_queue_items=2"),
        (DeadlineExceeded("no result within 2 s"), 504, "deadline_exceeded", "no result within 2 s"),
        (BatcherClosed("closed"), 503, "not_ready", "closed"),
        (NotReadyError("starting"), 503, "not_ready", "starting"),
        (FingerprintMismatchError("rows", "a", "b"), 503, "not_ready", "send the request again"),
        (ReplicaLostError("private"), 503, "not_ready", "send the request again"),
        (DeviceMemoryError("private"), 503, "out_of_memory", "shorter texts"),
        (NumericalError("private"), 500, "numerical", "no finite numbers"),
        (LabelEncodingError("private"), 500, "internal", "failed"),
        (StoreError("connect", "private"), 500, "internal", "failed"),
        (DispatchError("private"), 500, "internal", "failed"),
        (ConfigError("private"), 500, "internal", "failed"),
        (BackboneError("private"), 500, "internal", "failed"),
        (RuntimeError("private"), 500, "internal", "failed"),
    ],
)
def test_each_error_has_its_row(error: Exception, status: int, error_type: str, words: str) -> None:
    """Status, type and message; what is not the caller's business stays inside."""
    found = to_http(error)
    assert (found.status, found.error_type) == (status, error_type)
    assert words in found.message
    assert "private" not in found.message


def test_the_body() -> None:
    """Three keys: what is wrong, of which type, and where."""
    error = to_http(InputError("is empty", ("labels", 2, "name")))
    assert error.body() == {
        "error": "labels[2].name: is empty",
        "error_type": "invalid_input",
        "loc": ["labels", 2, "name"],
    }


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.1, "1"), (1.0, "1"), (1.2, "2"), (60.0, "60")])
def test_retry_after_of_a_full_queue(retry_after_s: float, header: str) -> None:
    """Whole seconds, rounded up, at least one."""
    assert to_http(QueueFull(1, 1, 1, 1, retry_after_s)).headers == {"Retry-After": header}


@pytest.mark.parametrize(
    "error", [NotReadyError("x"), FingerprintMismatchError("a", "b", "c"), ReplicaLostError("x"), BatcherClosed("x")]
)
def test_retry_after_of_what_passes_soon(error: Exception) -> None:
    """A service that is not ready says when to come again."""
    assert to_http(error).headers["Retry-After"] == "1"


@pytest.mark.parametrize("loc", [(), ("texts", 0), ("lone \ud800",)])
def test_the_body_can_be_written(loc: Any) -> None:
    """Whatever a caller sent, the error about it is JSON that can be encoded."""
    body = HttpError(422, "invalid_input", f"about {loc}", loc).body()
    assert json.loads(json.dumps(body).encode("utf-8")) == body
