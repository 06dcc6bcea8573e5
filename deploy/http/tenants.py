"""Whose request it is, as far as the label cache and label sets are concerned."""

from dataclasses import dataclass
from hashlib import sha256

from starlette.requests import Request

from deploy.http.gate import CALLER


@dataclass(frozen=True, slots=True)
class Tenants:
    """Tells callers apart by the key that they present, where the settings ask for it.

    per_key: callers with keys of different names share neither cached labels nor label sets; a new key of the same name
      finds what the old one left. Where no keys are asked for, the whole `Authorization` header stands for the caller,
      unchecked: that keeps one's labels out of another's timing, not strangers out of the service
    """

    per_key: bool = False

    def of(self, request: Request) -> str | None:
        """The tenant of a request; None for everything that all share, callers without a key included."""
        if not self.per_key:
            return None
        name: str | None = request.scope.get(CALLER)
        if name is not None:
            return sha256(b"name " + name.encode()).hexdigest()
        header = request.headers.get("authorization", "")
        return sha256(header.encode("latin-1")).hexdigest() if header else None
