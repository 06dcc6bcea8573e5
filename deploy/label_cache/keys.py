"""The keys of cache entries: `namespace:schema:fingerprint:kind:hash`, with a tenant's hash before the kind."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenalign.labels import label_hash, list_hash

SCHEMA = 1
"""Raised whenever entries of older programs must not be found any more."""

# No colon, so that no two parts can run into each other; no braces, which Redis Cluster reads as a hash tag.
_PART = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """Builds the keys of one namespace (whose entries), one label fingerprint (of which model), and maybe one tenant.

    tenant: any words, of which the keys show a hash; None for the entries that all share
    Raises `ValueError` unless the tenant has a character, and each other part is 1 to 128 letters, digits, dots,
    underscores or hyphens.
    """

    namespace: str
    fingerprint: str
    tenant: str | None = None
    _prefix: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("namespace", self.namespace), ("fingerprint", self.fingerprint)):
            if not _PART.fullmatch(value):
                raise ValueError(f"{name} {value!r} must be 1 to 128 letters, digits, dots, underscores or hyphens")
        if self.tenant == "":
            raise ValueError("tenant is empty; name one, or give None for the entries that all share")
        owner = "" if self.tenant is None else f"{tenant_hash(self.namespace, self.tenant)}:"
        object.__setattr__(self, "_prefix", f"{self.namespace}:{SCHEMA}:{self.fingerprint}:{owner}")

    def of_tenant(self, tenant: str | None) -> "CacheKeys":
        """The keys of the same namespace and model for `tenant`."""
        return self if tenant == self.tenant else CacheKeys(self.namespace, self.fingerprint, tenant)

    def of_fingerprint(self, fingerprint: str) -> "CacheKeys":
        """The keys of the same namespace and tenant for another model."""
        return self if fingerprint == self.fingerprint else CacheKeys(self.namespace, fingerprint, self.tenant)

    def list(self, descriptions: Iterable[str]) -> str:
        """The key of a whole candidate list, the same for every order of it."""
        return self._key("list", list_hash(descriptions))

    def seen(self, descriptions: Iterable[str]) -> str:
        """The key of the mark that says that a list was asked for before."""
        return self._key("seen", list_hash(descriptions))

    def label(self, description: str) -> str:
        """The key of one description."""
        return self._key("label", label_hash(description))

    def lock(self, description: str) -> str:
        """The key of the lock that says that a replica is encoding one description."""
        return self._key("lock", label_hash(description))

    def _key(self, kind: str, digest: str) -> str:
        return f"{self._prefix}{kind}:{digest}"


def tenant_hash(namespace: str, tenant: str) -> str:
    """128 bits of SHA-256, the namespace's length first, so that no two pairs are hashed from the same bytes."""
    name = namespace.encode()
    return hashlib.sha256(len(name).to_bytes(8, "little") + name + tenant.encode()).hexdigest()[:32]
