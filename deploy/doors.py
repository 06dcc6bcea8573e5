"""Ray's own doors on one machine, for `tokenalign-deploy serve`: on loopback alone, and most ask for a token.

docs/security.md lists every port, and a test compares the list with a running application's.
"""

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

# Ray's own switch between machines that may form clusters and those that are for themselves, where nodes have the
# address 127.0.0.1. Its default, and so its name, comes from the systems that are the latter by default.
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

# HAProxy's metrics and statistics have no setting for their address. So what starts it narrows their two lines of the
# file that Serve wrote for it, the only ones that bind a port without a host.
_NARROW = r"s/^\( *bind \)[*]\{0,1\}:\([0-9]*\)$/\1127.0.0.1:\2/"


def private_ray(given: Mapping[str, str], folder: Path, haproxy: Path | None) -> dict[str, str]:
    """What to set in the environment before Ray starts: nothing that is `given` there already.

    folder: private, for the token and the script that starts HAProxy; both are written where they are needed
    haproxy: its program, None where there is none
    """
    wanted = {**ALONE, "RAY_AUTH_MODE": "token"}
    if given.get("RAY_AUTH_MODE", "token") == "token" and "RAY_AUTH_TOKEN" not in given:
        wanted["RAY_AUTH_TOKEN_PATH"] = str(folder / "ray-token")
    found = {name: value for name, value in wanted.items() if name not in given}
    if (token := found.get("RAY_AUTH_TOKEN_PATH")) is not None:
        _write(Path(token), secrets.token_hex(32), 0o600)
    if haproxy is not None and "RAY_SERVE_HAPROXY_BINARY_PATH" not in given:
        script = folder / "haproxy"
        _write(script, _script(haproxy), 0o700)
        if os.access(script, os.X_OK):  # not where programs of this folder may not run: then HAProxy's own is started
            found["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(script)
    return found


def _script(haproxy: Path) -> str:
    """Serve gives the file as `-db -f FILE`, and writes it anew before each start."""
    return f'#!/bin/sh\nset -e\nsed -i -e {shlex.quote(_NARROW)} "$3"\nexec {shlex.quote(str(haproxy))} "$@"\n'


def _write(path: Path, text: str, mode: int) -> None:
    """A new file that nobody else could ever open."""
    path.touch(mode, exist_ok=False)
    path.write_text(text, encoding="utf-8")
