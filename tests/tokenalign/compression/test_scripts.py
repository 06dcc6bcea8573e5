"""Tokens that carry a script."""

import pytest

from tokenalign.compression.scripts import Script
from tokenalign.errors import CompressionError

HANGUL = Script.named("Hangul")


@pytest.mark.parametrize(
    "token",
    [
        "한",
        " 한국어",
        "(한",
        "ㅋㅋ",
        "中한",
        "한".encode()[:2],
        "한".encode()[1:],
        "한".encode()[2:] + "글".encode()[:1],
        "한글".encode()[1:5],
    ],
)
def test_carriers(token: str | bytes) -> None:
    """A character of the script anywhere, or nothing but pieces of its characters' bytes."""
    assert HANGUL.carried_by(token if isinstance(token, bytes) else token.encode())


@pytest.mark.parametrize(
    "token",
    ["", "a", "中", "の", " ", "中".encode()[:2], "中".encode()[:1], b" " + "한".encode()[:2], b"\xff", b"\x80" * 3],
)
def test_others(token: str | bytes) -> None:
    """Other scripts, pieces of others' characters, and pieces beside a character that is none of the script's."""
    assert not HANGUL.carried_by(token if isinstance(token, bytes) else token.encode())


def test_unicode_knows_the_script() -> None:
    """11,172 syllables and the letters; an unknown name is an error that says what a name looks like."""
    assert {chr(code) for code in range(0xAC00, 0xD7A4)} < HANGUL.characters
    assert "中" not in HANGUL.characters
    with pytest.raises(CompressionError, match="Klingon"):
        Script.named("Klingon")
