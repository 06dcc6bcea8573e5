"""API keys: made here, known by their hashes alone, read anew when the file with the hashes changes.

A key is 256 random bits, so nobody finds it by trying, and one round of SHA-256 hides it as well as a slow hash for
passwords would; that one would cost each request more than its classification.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tokenalign.errors import ConfigError

CHECK_PERIOD_S = 1.0
"""A changed file is heeded within this time; looking for a change costs a system call."""

KEY_PREFIX = "tokenalign-"
"""By which scanners, and people, know a key that was put where none belongs."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
HASH = r"[0-9a-f]{64}"

_LINE = re.compile(rf"({NAME})\s+({HASH})", re.ASCII)

logger = logging.getLogger(__name__)

Hashes = Mapping[bytes, str]
"""From the SHA-256 of a key to the name of who has it."""


def new_key() -> str:
    """A key that there was never before."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """The SHA-256 of a key, in hexadecimal; headers are Latin-1."""
    return hashlib.sha256(key.encode("latin-1")).hexdigest()


class KeyRing:
    """The keys that are good, from settings and from a file that may change.

    Of several with one name all are good, so that a caller can go from an old one to a new one.
    """

    def __init__(
        self,
        listed: Mapping[str, tuple[str, ...]],
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """listed: hashes by name; file: lines of a name and a hash. `ConfigError` where the file is no such file."""
        self._listed = {bytes.fromhex(found): name for name, hashes in listed.items() for found in hashes}
        self._file = file
        self._clock = clock
        self._checked_at = clock()
        self._version = _version(file)
        self._hashes: Hashes = self._read()

    @property
    def names(self) -> frozenset[str]:
        """Of all who have a key."""
        return frozenset(self._hashes.values())

    def name_of(self, key: str) -> str | None:
        """Who has this key, None where nobody has.

        Keys are compared by looking up their SHA-256. The time of that tells nothing: bytes are compared only where
        Python's own hashes of them agree, which are seeded at random, and of a key the SHA-256 would give nothing away.
        """
        self._follow()
        return self._hashes.get(hashlib.sha256(key.encode("latin-1", "replace")).digest())

    def _follow(self) -> None:
        """Reads a changed file. One that can't be read leaves the keys as they were: half a write locks nobody out."""
        now = self._clock()
        if self._file is None or now - self._checked_at < CHECK_PERIOD_S:
            return
        self._checked_at = now
        if (version := _version(self._file)) == self._version:
            return
        self._version = version
        try:
            self._hashes = self._read()
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error)  # noqa: TRY400  the words say it all
        else:
            logger.warning("keys were read again; there are some for %s", ", ".join(sorted(self.names)))

    def _read(self) -> Hashes:
        if self._file is None:
            return self._listed
        return {**self._listed, **read_keys(self._file)}


def read_keys(file: Path) -> Hashes:
    """The hashes in a file; `ConfigError` naming the line that is none, or where there is none at all."""
    where = f"access.keys_file: {file}"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} can't be read; correct the path or its permissions") from error
    found = dict(_hashes(lines, where))
    if not found:
        raise ConfigError(f"{where} has no keys; `tokenalign-deploy keys new NAME` prints a line for it")
    return found


def _hashes(lines: list[str], where: str) -> Iterator[tuple[bytes, str]]:
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if (match := _LINE.fullmatch(line.strip())) is None:  # and is not repeated: it may be a key itself
            raise ConfigError(
                f"{where} line {number}: must be a name and 64 hexadecimal digits, "
                "as `tokenalign-deploy keys new NAME` prints them"
            )
        yield bytes.fromhex(match[2]), match[1]


def _version(file: Path | None) -> tuple[int, ...] | None:
    """Another one for each state of a file; None where it can't be asked for."""
    try:
        found = file.stat() if file is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
