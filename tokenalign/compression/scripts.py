"""Which tokens carry a script, by Unicode: a character of it, or nothing but pieces of its characters' bytes."""

from dataclasses import dataclass
from functools import cache

import regex

from tokenalign.errors import CompressionError

_SURROGATES = range(0xD800, 0xE000)


@dataclass(frozen=True, slots=True)
class Script:
    """The characters of a script, and how their UTF-8 may begin and end."""

    name: str
    characters: frozenset[str]
    beginnings: frozenset[bytes]
    endings: frozenset[bytes]

    @classmethod
    @cache
    def named(cls, name: str) -> "Script":
        """The script of a Unicode name, such as Hangul; `CompressionError` for an unknown one."""
        try:
            pattern = regex.compile(rf"\p{{Script={name}}}")
        except regex.error as error:
            raise CompressionError(
                f"--script {name}: Unicode has no such script; name one as Hangul, Cyrillic or Devanagari"
            ) from error
        every = "".join(chr(code) for code in range(0x110000) if code not in _SURROGATES)
        characters = frozenset(pattern.findall(every))
        encoded = [character.encode() for character in characters]
        return cls(
            name,
            characters,
            frozenset(code[:size] for code in encoded for size in range(1, len(code))),
            frozenset(code[size:] for code in encoded for size in range(1, len(code))),
        )

    def carried_by(self, token: bytes) -> bool:
        """Whether a token holds a character of the script, or can only stand within its characters.

        The latter are pieces of UTF-8 by themselves: the end of one character, whole ones, the beginning of another,
        every byte of them one of the script's.
        """
        start = 0
        while start < len(token) and 0x80 <= token[start] < 0xC0:
            start += 1
        first, rest, last = token[:start], token[start:], b""
        try:
            whole = rest.decode()
        except UnicodeDecodeError as error:
            whole, last = rest[: error.start].decode(), rest[error.start :]
        if any(character in self.characters for character in whole):
            return True
        if whole or not token:
            return False
        return (not first or first in self.endings) and (not last or last in self.beginnings)
