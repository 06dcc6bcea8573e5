"""A document of headings, paragraphs, lists, tables and plots, written as Markdown or as one HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

STYLE = """body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid #ddd }
th { text-align: left } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
svg { max-width: 100%; height: auto }"""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 1 is the document's title."""

    words: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Plain words; nothing in them is markup."""

    words: str


@dataclass(frozen=True, slots=True)
class Items:
    """A list of plain sentences."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Code:
    """Lines of code in a language."""

    language: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; every column but the first `words` ones holds numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot as SVG text. name: of its file where it gets one; title: what it shows, for those who don't see it."""

    name: str
    title: str
    svg: str


Block = Heading | Paragraph | Items | Code | Table | Plot


def as_html(blocks: Sequence[Block]) -> str:
    """One page that needs nothing else: plots stand in it."""
    title = next((block.words for block in blocks if isinstance(block, Heading)), "Report")
    head = f'<head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>'
    body = "\n".join(_html(block) for block in blocks)
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'


def as_markdown(blocks: Sequence[Block], plots: str = "") -> str:
    """Markdown; plots are the files `{plots}{name}.svg`."""
    return "\n\n".join(_markdown(block, plots) for block in blocks) + "\n"


def write_document(path: Path, blocks: Sequence[Block], front_matter: str = "") -> None:
    """Write HTML where the file's name ends so, else Markdown with its plots as files beside it."""
    if path.suffix.lower() in (".html", ".htm"):
        path.write_text(as_html(blocks), encoding="utf-8")
        return
    plots = f"{path.stem}-"
    path.write_text(front_matter + as_markdown(blocks, plots), encoding="utf-8")
    for block in blocks:
        if isinstance(block, Plot):
            path.with_name(f"{plots}{block.name}.svg").write_text(block.svg, encoding="utf-8")


def _html(block: Block) -> str:
    match block:
        case Heading(words, level):
            return f"<h{level}>{escape(words)}</h{level}>"
        case Paragraph(words):
            return f"<p>{escape(words)}</p>"
        case Items(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Code(_, lines):
            return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"
        case Table(headings, rows, words):
            kinds = ["" if i < words else ' class="number"' for i in range(len(headings))]
            top = "".join(f"<th{kind}>{escape(word)}</th>" for kind, word in zip(kinds, headings, strict=True))
            cells = [
                "".join(f"<td{kind}>{escape(word)}</td>" for kind, word in zip(kinds, row, strict=True)) for row in rows
            ]
            return f"<table><tr>{top}</tr>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
        case Plot(_, _, svg):
            return svg


def _markdown(block: Block, plots: str) -> str:
    match block:
        case Heading(words, level):
            return f"{'#' * level} {_plain(words)}"
        case Paragraph(words):
            return _plain(words)
        case Items(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Code(language, lines):
            return "\n".join([f"```{language}", *lines, "```"])
        case Table(headings, rows, words):
            marks = ["---" if i < words else "---:" for i in range(len(headings))]
            cells: list[Sequence[str]] = [headings, marks, *rows]
            return "\n".join(f"| {' | '.join(_cell(word) for word in line)} |" for line in cells)
        case Plot(name, title, _):
            return f"![{_plain(title)}]({plots}{name}.svg)"


def _plain(words: str) -> str:
    """Words of labels and files as words: what Markdown would take for markup is escaped."""
    line = " ".join(words.split())
    return "".join(f"\\{c}" if c in "\\`*_[]<>" else c for c in line)


def _cell(word: str) -> str:
    return word if set(word) <= set("-:") else _plain(word).replace("|", "\\|")
