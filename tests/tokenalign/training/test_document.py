"""Documents as Markdown and as HTML, and what others wrote within them."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tokenalign.training.document import (
    Block,
    Code,
    Heading,
    Items,
    Paragraph,
    Plot,
    Table,
    as_html,
    as_markdown,
    write_document,
)

NASTY = 'a <script>alert("1")</script> | *b* [c](d) `e` & \\ #'
BLOCKS: list[Block] = [
    Heading("A report", 1),
    Paragraph(NASTY),
    Items([NASTY, "plain"]),
    Code("python", ["print(1 < 2)"]),
    Table(["label", "F1"], [[NASTY, "0.500"], ["---", "1.000"]]),
    Plot("curve", "a curve of <1>", '<svg xmlns="http://www.w3.org/2000/svg"><title>t</title></svg>'),
]


class Reader(HTMLParser):
    """Elements in order, with what is open; fails where a page closes what it hasn't opened."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_html_is_one_page_and_words_stay_words() -> None:
    """The page is well-formed, refers to nothing outside, and what others wrote is no markup in it."""
    page = as_html(BLOCKS)
    reader = Reader(page)
    assert "script" not in reader.tags
    assert reader.words.count(NASTY) == 3
    assert "print(1 < 2)" in reader.words
    for tag in ("h1", "p", "ul", "pre", "table", "svg"):
        assert tag in reader.tags
    assert page.startswith("<!doctype html>")
    assert "<title>A report</title>" in page
    assert not re.search(r"\b(src|href)=", page)
    assert '<td class="number">0.500</td>' in page


def test_markdown_escapes_what_others_wrote() -> None:
    """A label with a bar, a star, a bracket or a tag stays within its cell and its words."""
    lines = as_markdown(BLOCKS, "report-").split("\n")
    escaped = r'a \<script\>alert("1")\</script\> {} \*b\* \[c\](d) \`e\` & \\ #'
    assert escaped.format("|") in lines
    assert f"| {escaped.format(chr(92) + '|')} | 0.500 |" in lines
    assert "| --- | ---: |" in lines
    assert "![a curve of \\<1\\>](report-curve.svg)" in lines
    assert lines.index("```python") + 1 == lines.index("print(1 < 2)")


def test_a_label_that_looks_like_a_rule() -> None:
    """Only the line below a table's headings is one to Markdown, so a label of dashes may stand as it is."""
    rows = [line for line in as_markdown(BLOCKS).split("\n") if line.startswith("|")]
    assert rows[1] == "| --- | ---: |"
    assert rows[3] == "| --- | 1.000 |"


@pytest.mark.parametrize("name", ["report.html", "REPORT.HTM"])
def test_html_by_the_files_name(tmp_path: Path, name: str) -> None:
    """One file, whatever the case of its ending."""
    write_document(tmp_path / name, BLOCKS)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert "<svg" in (tmp_path / name).read_text()


def test_markdown_with_its_plots_beside_it(tmp_path: Path) -> None:
    """Anything else is Markdown, after its front matter, with a file for each plot that it names."""
    write_document(tmp_path / "card.md", BLOCKS, "---\na: b\n---\n\n")
    text = (tmp_path / "card.md").read_text()
    assert text.startswith("---\na: b\n---\n\n# A report\n")
    (plot,) = re.findall(r"\]\(([^)]*\.svg)\)", text)
    assert (tmp_path / plot).read_text().startswith("<svg")
