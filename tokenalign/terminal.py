"""Answers for people: bars, matched words and warnings in a terminal.

What matched is shown in the text itself where the terminal has styles; the lines below say the same without.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tokenalign.abstention import Abstention
from tokenalign.results import Classification, Match, TruncationReport, Warning_, WindowReport

BAR_WIDTH = 24
SHOWN_CHARS = 200
CUT_WORDS_CHARS = 40
BEFORE_MATCH_CHARS = 40
STRONG_MATCH, WEAK_MATCH = "underline green", "underline cyan"  # at least half of the largest contribution, or less
ZERO_WIDTH_JOINER = "\u200d"


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

    def show(self, text: str, answer: Classification, given: Sequence[str] | None = None) -> None:
        """The text with its matched words marked, its labels best first, what was not read, and the matches.

        given: the labels that a text gets where that may be any number
        """
        self._out.print(marked_text(text, answer))
        self._out.print(_scores(answer))
        if given:
            self._out.print(Text(f"  labels: {', '.join(one_line(label, SHOWN_CHARS) for label in given)}"))
        if "abstained" in answer:
            self._out.print(Text(f"  {abstention_notice(answer['abstained'])}", style="yellow"))
        if answer["truncation"] is not None:
            self._out.print(Text(f"  {cut_notice(text, answer['truncation'])}", style="yellow"))
        if "windows" in answer and answer["windows"]["count"] > 1:
            self._out.print(Text(f"  {windows_notice(answer['windows'])}"))
        self._show_matches(answer.get("matches", []))
        self._out.print()

    def _show_matches(self, matches: Sequence[Match]) -> None:
        label = None
        for match in matches:
            if match["label"] != label:
                label = match["label"]
                said = label if match["description"] == label else f"{label} ({match['description']})"
                self._out.print(Text(f"  {one_line(said, SHOWN_CHARS)} matched:"))
            self._out.print(Text(f"    {match_line(match)}"))


def _scores(answer: Classification) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    table.add_column(justify="right")
    table.add_column(width=BAR_WIDTH)
    table.add_column(overflow="fold")
    logits = answer.get("logits")
    for i, (label, score) in enumerate(answer["scores"].items()):
        number = f"{score:.3f}" if logits is None else f"{score:.3f}  {logits[label]:+.2f}"
        style = "bold" if i == 0 and answer["label"] is not None else ""
        table.add_row(
            Text(number, style=style),
            ProgressBar(
                total=1,
                completed=score,
                width=BAR_WIDTH,
                complete_style="green" if style else "cyan",
                finished_style="green" if style else "cyan",
            ),
            Text(one_line(label, SHOWN_CHARS), style=style),
        )
    return table


def marked_text(text: str, answer: Classification) -> Text:
    """The text on one line; words that the best label matched are underlined, the more they contribute the stronger.

    A long text begins a little before the first of them. Where there are no matches it is shown as it is.
    """
    best = next(iter(answer["scores"]))
    shares: dict[tuple[int, int], float] = {}
    for match in answer.get("matches", []):
        if match["label"] == best:
            span = (match["span"][0], match["span"][1])
            shares[span] = shares.get(span, 0.0) + match["contribution"]
    strongest = max(shares.values(), default=0.0)
    start = 0
    if shares and max(end for _, end in shares) > SHOWN_CHARS:
        start = max(0, min(begin for begin, _ in shares) - BEFORE_MATCH_CHARS)
    shown = text[start : start + SHOWN_CHARS]
    line = Text("…" if start else "", style="bold")
    styled: list[tuple[str, str]] = []
    for at, character in enumerate(shown, start):
        share = max((share for (begin, end), share in shares.items() if begin <= at < end), default=None)
        style = "" if share is None else STRONG_MATCH if share >= strongest / 2 else WEAK_MATCH
        if not character.isspace():
            styled.append((_printable(character), style))
        elif styled and styled[-1][0] != " ":
            styled.append((" ", style))
    for style, run in groupby(styled, key=lambda pair: pair[1]):  # escapes within an emoji would take it apart
        line.append("".join(character for character, _ in run), style=style)
    if start + SHOWN_CHARS < len(text):
        line.append("…")
    return line


def _printable(character: str) -> str:
    """One character as one that steers nothing; the joiner that makes up emoji stays."""
    return character if character.isprintable() or character == ZERO_WIDTH_JOINER else "\ufffd"


def abstention_notice(abstained: Abstention) -> str:
    """One sentence that says why no label is named."""
    what = "best score" if abstained["reason"] == "min_score" else "lead of the best score"
    return f"No label: the {what} is {abstained['value']:.3f}, below {abstained['reason']} {abstained['limit']:g}."


def windows_notice(windows: WindowReport) -> str:
    """One sentence that says where the winning window lies."""
    start, end = windows["spans"][windows["best"]]
    return f"Read in {windows['count']} windows; characters {start} to {end} say most for the best label."


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
