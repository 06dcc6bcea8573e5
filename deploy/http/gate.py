"""Before every route: whether the caller has a key, or may do without, and is within its share."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.http.answers import ErrorShape, error_response
from deploy.http.errors import HttpError, NotLocalError, UnauthenticatedError
from deploy.http.hosts import host_of, is_loopback
from deploy.http.keys import KeyRing
from deploy.http.quotas import QuotaError, Quotas
from deploy.metrics import KEY_REFUSALS, KEY_REQUESTS
from deploy.settings import AccessSettings
from deploy.telemetry import Reading

CALLER = "tokenalign.caller"
"""Where an ASGI scope has the name of the key that a request came with."""

OPEN = frozenset(
    {
        *("/", "/docs", "/docs/oauth2-redirect", "/openapi.json"),
        *("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"),
    }
)
"""Paths that need no key: whether the service runs, the page, and what may be asked. They tell nothing of the model."""

_SCHEME = "ApiKey"
_BEARER = {"type": "http", "scheme": "bearer", "description": "An API key of this service."}

_NO_KEY = "no API key came with the request; send one as Authorization: Bearer KEY"
_WRONG_KEY = "the API key is none that is known here; correct it, or ask who runs the service for one"
_NOT_LOCAL = (
    "the service has no API keys, and without them it answers callers on its own machine alone, under a loopback "
    "address and from no other site's pages; give it keys (access.keys_file), or set access.allow_unauthenticated"
)


class Gate:
    """Who may pass. Without keys that is everybody, or everybody on this machine, as the settings say.

    keys: those that are good, None where none are asked for; quotas: of each key
    local_only: without keys, only requests to a loopback address and from one pass. The address in `Host` is the
      caller's word: asking for it keeps out who means no harm, and pages of a site that has its name lead here, but
      not who forges it
    origins: of pages besides our own that may ask
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        quotas: Quotas | None = None,
        *,
        local_only: bool = False,
        origins: Iterable[str] = (),
    ) -> None:
        self._keys = keys
        self._quotas = quotas
        self._local_only = local_only
        self._origins = frozenset(origins)
        self._passed: Counter[str] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()

    @classmethod
    def of(cls, settings: AccessSettings) -> "Gate":
        """The gate that the settings ask for; `ConfigError` where the file of keys is not as it must be."""
        if not settings.has_keys:
            return cls(local_only=not settings.allow_unauthenticated, origins=settings.cors_origins)
        keys = KeyRing(settings.keys, settings.keys_file)
        limits = settings.max_concurrent_per_key, settings.requests_per_s_per_key, settings.burst_per_key
        return cls(keys, Quotas(*limits) if any(limits) else None, origins=settings.cors_origins)

    @property
    def asks_for_keys(self) -> bool:
        """Whether a key is needed."""
        return self._keys is not None

    @property
    def is_open(self) -> bool:
        """Whether everybody passes."""
        return self._keys is None and not self._local_only

    def enter(self, scope: Scope) -> str | None:
        """The name of the caller's key, None where none is asked for. Who entered must `leave`.

        Raises `UnauthenticatedError`, `NotLocalError` or `QuotaError`.
        """
        if self._keys is None:
            if self._local_only:
                self._check_local(scope)
            return None
        name = self._name(self._keys, Headers(scope=scope))
        if self._quotas is not None:
            try:
                self._quotas.enter(name)
            except QuotaError:
                self._refused[name, "quota"] += 1
                raise
        self._passed[name] += 1
        return name

    def leave(self, name: str | None) -> None:
        """Ends a request."""
        if name is not None and self._quotas is not None:
            self._quotas.leave(name)

    def readings(self) -> Iterator[Reading]:
        """Requests of each key, and what was refused; of a key that nobody has, no name is known."""
        for name, count in self._passed.items():
            yield Reading(KEY_REQUESTS, count, (name,))
        for (name, reason), count in self._refused.items():
            yield Reading(KEY_REFUSALS, count, (name, reason))

    def _name(self, keys: KeyRing, headers: Headers) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not (key := key.strip()):
            self._refused["", "no_key"] += 1
            raise UnauthenticatedError(_NO_KEY)
        if (name := keys.name_of(key)) is None:
            self._refused["", "wrong_key"] += 1
            raise UnauthenticatedError(_WRONG_KEY)
        return name

    def _check_local(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host, client, origin = headers.get("host", ""), scope.get("client"), headers.get("origin")
        ours = origin is None or origin in self._origins or urlsplit(origin).netloc == host
        if not (ours and is_loopback(host_of(host)) and (client is None or is_loopback(client[0]))):
            self._refused["", "not_local"] += 1
            raise NotLocalError(_NOT_LOCAL)


class Guarded:
    """An ASGI application that only those reach whom the gate lets through."""

    def __init__(self, app: ASGIApp, gate: Gate, shape: ErrorShape) -> None:
        self._app = app
        self._gate = gate
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; nothing of a refused one's body is read."""
        try:
            caller = self._gate.enter(scope)
        except (UnauthenticatedError, NotLocalError, QuotaError) as error:
            await error_response(error, self._shape)(scope, receive, send)
            return
        try:
            scope[CALLER] = caller
            await self._app(scope, receive, send)
        finally:
            self._gate.leave(caller)


def guard(routes: Iterable[BaseRoute], gate: Gate, shape: ErrorShape = HttpError.body) -> None:
    """Puts the gate before each of these routes that is not `OPEN`; its errors are told in `shape`."""
    if gate.is_open:
        return
    for route in routes:
        if isinstance(route, Route) and route.path not in OPEN:
            route.app = Guarded(route.app, gate, shape)


def document_keys(app: FastAPI) -> None:
    """Has the OpenAPI document say which routes need a key, and what is answered to who has none."""
    written = app.openapi

    def openapi() -> dict[str, Any]:
        document = written()
        document.setdefault("components", {})["securitySchemes"] = {_SCHEME: _BEARER}
        for path, operations in document["paths"].items():
            if path in OPEN:
                continue
            for operation in operations.values():
                operation["security"] = [{_SCHEME: []}]
                operation["responses"].setdefault("401", {"description": "No API key, or none that is known here."})
                operation["responses"].setdefault("429", {"description": "The key is over its share; see Retry-After."})
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
