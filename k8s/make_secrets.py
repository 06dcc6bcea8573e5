"""Prints the two Secrets that the manifests ask for, with fresh random passwords.

`python k8s/make_secrets.py | kubectl apply -f -` puts them in the cluster. Printed anew, every password is another one:
then restart both Redis and the Ray pods. Nothing is written to a file.
"""

import hashlib
import json
import secrets
from typing import Any

NAMESPACE = "tokenalign"

LABEL_CACHE_RIGHTS = "~tokenalign:* +getrange +get +set +pexpire +del +eval +ping"
"""What docs/settings.md says the application needs; tokenalign is label_cache.namespace."""

GCS_RIGHTS = "~RAY* ~DUMMY +@read +@write +@connection +@scripting -@dangerous +info +keys"
"""Ray's tables are under RAY, and it deletes DUMMY to see who leads. Nothing that administers the server is needed."""


def main() -> None:
    """Prints a YAML stream (each document is JSON, which is YAML)."""
    for secret in (label_cache_secret(), gcs_secret()):
        print(f"---\n{json.dumps(secret, indent=2)}")


def label_cache_secret() -> dict[str, Any]:
    """The label cache's users, the application's password, and the key that signs cached entries."""
    password, probe = new_password(), new_password()
    users = {"tokenalign": (password, LABEL_CACHE_RIGHTS), "probe": (probe, "+ping")}
    return secret(
        "label-cache-auth",
        {"password": password, "signing-key": new_password(), "probe-password": probe, "users.acl": acl(users)},
    )


def gcs_secret() -> dict[str, Any]:
    """The users of Ray's own Redis, and the password of Ray's."""
    password, probe = new_password(), new_password()
    users = {"ray": (password, GCS_RIGHTS), "probe": (probe, "+ping")}
    return secret(
        "gcs-redis-auth",
        {"username": "ray", "password": password, "probe-password": probe, "users.acl": acl(users)},
    )


def acl(users: dict[str, tuple[str, str]]) -> str:
    """An ACL file for Redis: these users with (password, rights), the password as its hash, and no default user."""
    lines = ["user default reset off sanitize-payload"]
    for name, (password, rights) in users.items():
        digest = hashlib.sha256(password.encode()).hexdigest()
        lines.append(f"user {name} reset on sanitize-payload #{digest} {rights}")
    return "\n".join(lines) + "\n"


def secret(name: str, values: dict[str, str]) -> dict[str, Any]:
    """A Kubernetes Secret of text values."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "type": "Opaque",
        "stringData": values,
    }


def new_password() -> str:
    """256 random bits, without characters that a shell or a URL could misread."""
    return secrets.token_hex(32)


if __name__ == "__main__":
    main()
