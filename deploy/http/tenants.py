"""Whose request it is, as far as the label cache and label sets are concerned."""

from dataclasses import dataclass
from hashlib import sha256

from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tells callers apart by the key that they present, where the settings ask for it.

    per_key: callers with different `Authorization` headers share neither cached labels nor label sets. Keys aren't
    checked here: this keeps one's labels out of another's timing, not strangers out of the service.
    """

    per_key: bool = False

    def of(self, request: Request) -> str | None:
        """The tenant of a request; None for everything that all share, callers without a key included."""
        key = request.headers.get("authorization", "") if self.per_key else ""
        return sha256(key.encode("latin-1")).hexdigest() if key else None
