"""The HTTP client of a tokenalign service: `TokenAlignClient`, and `AsyncTokenAlignClient` for asyncio.

It needs httpx (`pip install 'tokenalign[client]'`), and loads neither torch nor transformers.
"""

try:
    import httpx as _httpx  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("tokenalign.client needs httpx; install it with: pip install 'tokenalign[client]'") from error

from tokenalign.client.answers import ClassifyResponse, KeptLabelSet, LabelSetReport, ModelIdentity, ModelInfo, Usage
from tokenalign.client.asynchronous import AsyncClassifyStream, AsyncTokenAlignClient
from tokenalign.client.errors import (
    AuthenticationError,
    InvalidAnswerError,
    NotFoundError,
    OverloadedError,
    RequestTooLargeError,
    ServiceConnectionError,
    ServiceDeadlineError,
    ServiceError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from tokenalign.client.requests import ClassifyOptions
from tokenalign.client.synchronous import ClassifyStream, TokenAlignClient

__all__ = [
    "AsyncClassifyStream",
    "AsyncTokenAlignClient",
    "AuthenticationError",
    "ClassifyOptions",
    "ClassifyResponse",
    "ClassifyStream",
    "InvalidAnswerError",
    "KeptLabelSet",
    "LabelSetReport",
    "ModelIdentity",
    "ModelInfo",
    "NotFoundError",
    "OverloadedError",
    "RequestTooLargeError",
    "ServiceConnectionError",
    "ServiceDeadlineError",
    "ServiceError",
    "ServiceTimeoutError",
    "ServiceUnavailableError",
    "TokenAlignClient",
    "Usage",
]
