"""Answers for people: bars, matches and warnings in a terminal."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tokenalign.results import Classification, Match, TruncationReport, Warning_

BAR_WIDTH = 24
SHOWN_CHARS = 200
CUT_WORDS_CHARS = 40


class Terminal:
    """Writes answers to stdout; warnings, errors and progress to stderr. Colours only where they are shown."""

    def __init__(self) -> None:
        self._out = Console(file=sys.stdout, highlight=False)
        self._err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def loading(self) -> AbstractContextManager[Any]:
        """A sign of life on stderr while the model is loaded; nothing where stderr is no terminal."""
        return self._err.status("Loading the model …")

    def warn(self, warnings: Sequence[Warning_]) -> None:
        """One line for each warning."""
        for warning in warnings:
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in warning["loc"]).lstrip(".")
            self._err.print(Text(f"warning: {where}: {warning['message']}", style="yellow"))

    def error(self, message: str) -> None:
        """One line that says what was not accepted."""
        self._err.print(Text(f"error: {message}", style="red"))

    def show(self, text: str, answer: Classification) -> None:
        """The text, its labels best first, what was cut, and the matches where asked for."""
        self._out.print(Text(one_line(text, SHOWN_CHARS), style="bold"))
        self._out.print(_scores(answer))
        if answer["truncation"] is not None:
            self._out.print(Text(f"  {cut_notice(text, answer['truncation'])}", style="yellow"))
        self._show_matches(answer.get("matches", []))
        self._out.print()

    def _show_matches(self, matches: Sequence[Match]) -> None:
        label = None
        for match in matches:
            if match["label"] != label:
                label = match["label"]
                self._out.print(Text(f"  {one_line(label, SHOWN_CHARS)} matched:"))
            self._out.print(Text(f"    {match_line(match)}"))


def _scores(answer: Classification) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    table.add_column(justify="right")
    table.add_column(width=BAR_WIDTH)
    table.add_column(overflow="fold")
    logits = answer.get("logits")
    for i, (label, score) in enumerate(answer["scores"].items()):
        number = f"{score:.3f}" if logits is None else f"{score:.3f}  {logits[label]:+.2f}"
        style = "bold" if i == 0 else ""
        table.add_row(
            Text(number, style=style),
            ProgressBar(total=1, completed=score, width=BAR_WIDTH),
            Text(one_line(label, SHOWN_CHARS), style=style),
        )
    return table


def cut_notice(text: str, truncation: TruncationReport) -> str:
    """One sentence that says how much of the text was read, and which words were not."""
    unread = one_line(text[truncation["cut_at"] :].strip(), CUT_WORDS_CHARS)
    words = f", from {unread!r} on" if unread else ""
    return (
        f"Cut: {truncation['used']} of {truncation['tokens']} tokens were read. "
        f"Nothing after character {truncation['cut_at']}{words} had a say."
    )


def match_line(match: Match) -> str:
    """`label token -> text word (similarity, contribution)`."""
    return (
        f"{one_line(match['token'], SHOWN_CHARS)} -> {one_line(match['text'], SHOWN_CHARS)} "
        f"(similarity {match['similarity']:.2f}, contribution {match['contribution']:+.2f})"
    )


def one_line(text: str, limit: int) -> str:
    """The text on one line, at most `limit` characters, what can't be printed replaced: no text steers the terminal."""
    line = " ".join(text[: 4 * limit].split())
    shown = line if len(line) <= limit else line[: limit - 1] + "…"
    return "".join(character if character.isprintable() else "\ufffd" for character in shown)
