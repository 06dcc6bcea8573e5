"""The keys of cache entries: `namespace:schema:fingerprint:kind:hash`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tokenalign.labels import label_hash, list_hash

SCHEMA = 1
"""Raised whenever entries of older programs must not be found any more."""

# No colon, so that no two parts can run into each other; no braces, which Redis Cluster reads as a hash tag.
_PART = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """Builds the keys of one namespace (whose entries) and one label fingerprint (of which model).

    Raises `ValueError` unless each part is 1 to 128 letters, digits, dots, underscores or hyphens.
    """

    namespace: str
    fingerprint: str

    def __post_init__(self) -> None:
        for name, value in (("namespace", self.namespace), ("fingerprint", self.fingerprint)):
            if not _PART.fullmatch(value):
                raise ValueError(f"{name} {value!r} must be 1 to 128 letters, digits, dots, underscores or hyphens")

    def list(self, descriptions: Iterable[str]) -> str:
        """The key of a whole candidate list, the same for every order of it."""
        return self._key("list", list_hash(descriptions))

    def seen(self, descriptions: Iterable[str]) -> str:
        """The key of the mark that says that a list was asked for before."""
        return self._key("seen", list_hash(descriptions))

    def label(self, description: str) -> str:
        """The key of one description."""
        return self._key("label", label_hash(description))

    def _key(self, kind: str, digest: str) -> str:
        return f"{self.namespace}:{SCHEMA}:{self.fingerprint}:{kind}:{digest}"
