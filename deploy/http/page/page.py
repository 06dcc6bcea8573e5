"""The page as a response: one file, with headers that let it reach nothing but the service that serves it."""

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

from starlette.responses import Response


@dataclass(frozen=True, slots=True)
class Page:
    """The page's bytes, and the Content-Security-Policy that allows its own script and style and no others."""

    content: bytes
    policy: str

    @classmethod
    def load(cls) -> "Page":
        """The page that comes with this package."""
        return cls.of(resources.files(__package__).joinpath("page.html").read_bytes())

    @classmethod
    def of(cls, content: bytes) -> "Page":
        """The page with these bytes; `ValueError` unless it has exactly one script and one style, both inline."""
        policy = {
            "default-src": "'none'",
            "script-src": _hash_of_only(b"script", content),
            "style-src": _hash_of_only(b"style", content),
            "connect-src": "'self'",
            "img-src": "data:",  # its icon, without which browsers ask for /favicon.ico
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        return cls(content, "; ".join(f"{name} {value}" for name, value in policy.items()))

    def response(self) -> Response:
        """The answer to who opens the page."""
        return Response(
            self.content,
            media_type="text/html",
            headers={
                "Content-Security-Policy": self.policy,
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-cache",  # a new version must not speak an old page's API
            },
        )


def _hash_of_only(tag: bytes, content: bytes) -> str:
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), content, flags=re.DOTALL)
    if len(found) != 1 or content.count(b"<" + tag) != 1:
        raise ValueError(f"page.html: it must have exactly one inline <{tag.decode()}>, without attributes")
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[0]).digest()).decode()}'"
