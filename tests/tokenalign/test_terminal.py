"""Answers on a terminal: colours where they are shown, matched words marked, wide characters in place."""

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tokenalign.terminal import SHOWN_CHARS, Terminal, abstention_notice, marked_text, windows_notice


def match(span: tuple[int, int], contribution: float, label: str = "a") -> dict[str, Any]:
    return {"label": label, "span": list(span), "contribution": contribution}


def answer(*matches: dict[str, Any], **rest: Any) -> Any:
    found = {
        "label": "a",
        "score": 0.75,
        "scores": {"a": 0.75, "\u65e5\u672c": 0.25},
        "truncation": None,
        "warnings": [],
    }
    return found | ({"matches": list(matches)} if matches else {}) | rest


def rendered(text: Any, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=60, force_terminal=True, color_system="standard", **options).print(text, end="")
    return out.getvalue()


def styles(text: str, *matches: dict[str, Any]) -> dict[str, str]:
    """The marked pieces of a text with their styles."""
    line = marked_text(text, answer(*matches))
    return {line.plain[span.start : span.end]: str(span.style) for span in line.spans if span.style}


def test_words_are_marked_by_what_they_contribute() -> None:
    """Those with half of the largest contribution differ from the weaker; those of other labels are not marked."""
    found = styles("my card twice now", match((3, 7), 4.0), match((8, 13), 1.0), match((14, 17), 9.0, "b"))
    assert found == {"card": "underline green", "twice": "underline cyan"}


def test_contributions_to_one_word_add_up() -> None:
    """Two label tokens that matched the same word count together."""
    found = styles("card twice", match((0, 4), 2.0), match((0, 4), 2.0), match((5, 10), 3.0))
    assert found == {"card": "underline green", "twice": "underline green"}


def test_emoji_and_marks_stay_whole() -> None:
    """No escape sequence stands within a character that is made of several code points."""
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    out = rendered(marked_text(f"a {family} e\u0301 \u65e5\u672c", answer(match((2, 7), 1.0), match((8, 10), 1.0))))
    assert family in out
    assert "e\u0301" in out


def test_a_long_text_shows_its_matches() -> None:
    """It begins a little before the first matched word that would else not be seen, and says that it was shortened."""
    text = "x " * 300 + "card" + " y" * 300
    line = marked_text(text, answer(match((600, 604), 1.0)))
    assert line.plain.startswith("\u2026")
    assert line.plain.endswith("\u2026")
    assert "card" in line.plain
    assert len(line.plain) <= SHOWN_CHARS + 2
    assert marked_text("card", answer()).plain == "card"


def test_no_text_steers_the_terminal() -> None:
    """Escapes, line breaks and turned writing directions are shown, not passed on."""
    line = marked_text("a\x1b[31m\n\n b\u202e", answer(match((0, 1), 1.0)))
    assert line.plain == "a\ufffd[31m b\ufffd"


class Tty(io.StringIO):
    """A terminal, as far as rich asks."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, text: str, found: Any, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": "80"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", out)
    Terminal().show(text, found)
    return out.getvalue()


def full(**rest: Any) -> Any:
    whole = match((0, 4), 2.0) | {
        "description": "a card",
        "token": "card",
        "label_span": [2, 6],
        "text": "card",
        "similarity": 0.5,
    }
    return answer(whole, **rest)


def test_colours_only_where_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets them; NO_COLOR leaves underlines and no colour; a pipe gets plain text with the same words."""
    coloured = shown(monkeypatch, Tty(), "card", full())
    assert "\x1b[1;4;32mcard" in coloured
    plain_style = shown(monkeypatch, Tty(), "card", full(), NO_COLOR="1")
    assert "\x1b[1;4mcard" in plain_style
    assert "32m" not in plain_style
    piped = shown(monkeypatch, io.StringIO(), "card", full())
    assert "\x1b" not in piped
    assert "a (a card) matched:" in piped
    assert "card -> card (similarity 0.50, contribution +2.00)" in piped


def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with wide characters, of which a terminal of 40 cells holds 20."""
    out = shown(monkeypatch, Tty(), "\u65e5\u672c\u8a9e" * 30, answer(), COLUMNS="40", NO_COLOR="1", TERM="xterm")

    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert len(lines) > 5
    assert max(map(cell_len, lines)) <= 40


def test_an_abstention_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason, the number and the limit; no label stands out."""
    abstained = {"reason": "min_margin", "value": 0.25, "limit": 0.3}
    out = shown(monkeypatch, io.StringIO(), "card", answer(label=None, abstained=abstained))
    assert "No label: the lead of the best score is 0.250, below min_margin 0.3." in out
    low: Any = {"reason": "min_score", "value": 0.5, "limit": 0.75}
    assert abstention_notice(low) == "No label: the best score is 0.500, below min_score 0.75."


def test_the_winning_window_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a text was read in several."""
    windows: Any = {"count": 2, "best": 1, "spans": [[0, 10], [5, 15]]}
    assert windows_notice(windows) == "Read in 2 windows; characters 5 to 15 say most for the best label."
    assert "Read in 2 windows" in shown(monkeypatch, io.StringIO(), "card", answer(windows=windows))
    once = {"count": 1, "best": 0, "spans": [[0, 4]]}
    assert "Read in" not in shown(monkeypatch, io.StringIO(), "card", answer(windows=once))
