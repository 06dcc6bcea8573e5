"""Pages of other origins, where the settings let them ask."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from deploy.http.watch import REQUEST_ID

_SENT = ("Authorization", "Content-Type", "Accept", REQUEST_ID, "traceparent", "tracestate")
_READ = (REQUEST_ID, "Retry-After", "WWW-Authenticate", "Location")


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Has browsers let pages of these origins ask. Cookies stay out of it: there are none here."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=list(_SENT),
        expose_headers=list(_READ),
    )
