"""Readers: what is a row, what is a bad one, and windows that are the same wherever the reading begins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tokenalign.bulk import lines, reading
from tokenalign.bulk.opening import format_of, open_reader
from tokenalign.bulk.reading import Place, Source, file_identity
from tokenalign.bulk.rows import BadRow, Columns, Row, snippet
from tokenalign.errors import DataError, InputError

Write = Callable[[str, Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file: bytes, or a table as Parquet."""

    def to(name: str, content: Any) -> Path:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            parquet.write_table(content, path, row_group_size=5)
        return path

    return to


def source(path: Path, *, id_column: str | None = None, window_rows: int = 4) -> Source:
    return Source(path, format_of(path), Columns("text", id_column), window_rows)


def rows(path: Path, **options: Any) -> list[Row | BadRow]:
    return [row for window in open_reader(source(path, **options)).windows(Place()) for row in window.rows]


def texts(path: Path, **options: Any) -> list[tuple[int, str]]:
    return [(row.number, row.text) for row in rows(path, **options) if isinstance(row, Row)]


def reasons(path: Path, **options: Any) -> list[tuple[int, str]]:
    return [(row.number, row.reason) for row in rows(path, **options) if isinstance(row, BadRow)]


class TestJsonLines:
    def test_numbers_are_those_of_lines(self, write: Write) -> None:
        """A blank line is no row but counts; a mark at the start, CRLF and a last line without an end do no harm."""
        path = write("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "\\u00e9\\n\\u2028"}\n{"text": "c"}')
        assert texts(path) == [(0, "a"), (3, "é\n\u2028"), (4, "c")]
        assert reasons(path) == []

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"{", "the line is no JSON"),
            (b"[1]", "the line is no JSON object, but list"),
            (b'"a"', "the line is no JSON object, but str"),
            (b'{"other": 1}', "text: is missing; the row has ['other']"),
            (b'{"text": 7}', "text: must be a string, not int"),
            (b'{"text": null}', "text: must be a string, not NoneType"),
            (b'{"text": " \\t"}', "text: is empty or only white space"),
            (b'{"text": "a\\ud800"}', "text: has a lone surrogate U+D800"),
            (b'{"text": "a\\u0000"}', "text: has a NUL character"),
            (b'{"text": "caf\xe9"}', "byte 13 of the line is no UTF-8"),
            (b'{"text": "\xed\xa0\x80"}', "byte 10 of the line is no UTF-8"),
            (b'{"text": "a", "x": NaN}', "the line is no JSON: NaN is no JSON value"),
            (b'{"text": "a"} {"text": "b"}', "the line is no JSON: Extra data"),
            (b'{"text":' * 100_000, "the line is no JSON"),
            (b'{"text": ' + b"9" * 5_000 + b"}", "the line is no JSON"),
            (b'{"text": "' + b"a" * 100_001 + b'"}', "text: has 100,001 characters, at most 100,000"),
            (b"\x00" * 9, "the line is no JSON"),
        ],
    )
    def test_bad_lines(self, write: Write, line: bytes, reason: str) -> None:
        """Each is one bad row with its reason, and its neighbours are read."""
        path = write("a.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n')
        assert texts(path) == [(0, "a"), (2, "c")]
        [(number, told)] = reasons(path)
        assert number == 1
        assert told.startswith(reason)

    def test_a_line_without_end_is_passed_over(self, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a line beyond the limit only the beginning is held, and the next line is read."""
        monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
        monkeypatch.setattr(lines, "SKIP_BYTES", 64)
        path = write("a.jsonl", b'{"text": "' + b"a" * 5_000 + b'"}\n{"text": "c"}\n')
        assert texts(path) == [(1, "c")]
        [bad] = [row for row in rows(path) if isinstance(row, BadRow)]
        assert "is longer than" in bad.reason
        assert len(bad.raw) <= 200

    def test_ids(self, write: Write) -> None:
        """An id is what a JSON scalar can hold; anything else makes a bad row, as does a row without."""
        values = [b'"x"', b"7", b"1.5", b"true", b"null", b"[1]", b"1e999", b'"\\ud800"', b'"' + b"x" * 1_001 + b'"']
        path = write(
            "a.jsonl", b"".join(b'{"text": "a", "id": ' + value + b"}\n" for value in values) + b'{"text": "a"}'
        )
        assert [row.id for row in rows(path, id_column="id") if isinstance(row, Row)] == ["x", 7, 1.5, True, None]
        assert [number for number, reason in reasons(path, id_column="id") if reason.startswith("id: ")] == [
            5,
            6,
            7,
            8,
            9,
        ]

    @pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
    def test_utf_16_is_told(self, write: Write, mark: bytes) -> None:
        """A whole file of another encoding is an error, not a million bad rows."""
        with pytest.raises(DataError, match=r"a.jsonl is UTF-16.*convert it to UTF-8"):
            rows(write("a.jsonl", mark + '{"text": "a"}\n'.encode("utf-16-le")))


class TestCsv:
    def test_records(self, write: Write) -> None:
        """Quoted fields may hold delimiters, quotes and lines; blank lines are no rows; numbers are of records."""
        path = write("a.csv", b'\xef\xbb\xbfid,text\r\n1,"a, ""b""\r\nc"\r\n\r\n2,caf\xc3\xa9\r\n3,it"s')
        assert texts(path) == [(0, 'a, "b"\r\nc'), (1, "café"), (2, 'it"s')]
        assert [row.id for row in rows(path, id_column="id") if isinstance(row, Row)] == ["1", "2", "3"]

    def test_tabs(self, write: Write) -> None:
        """A .tsv file is the same with tabs."""
        assert texts(write("a.tsv", b"text\tx\na,b\t1\n")) == [(0, "a,b")]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"1", "has 1 fields, the header has 2"),
            (b"1,b,c", "has 3 fields, the header has 2"),
            (b"1,", "text: is empty"),
            (b'1,"b" c', "the line is no CSV record: ',' expected after '\"'"),
            (b"1,caf\xe9", "byte 5 of the record is no UTF-8"),
            (b"1,a\x00b", "text: has a NUL character"),
            (b"1,a\rb", "the line is no CSV record: new-line character"),
            (b"1," + b"a" * 140_000, "the line is no CSV record: field larger than field limit"),
        ],
    )
    def test_bad_records(self, write: Write, line: bytes, reason: str) -> None:
        """Each is one bad row with its reason, and its neighbours are read."""
        path = write("a.csv", b"id,text\n1,a\n" + line + b"\n3,c\n")
        assert texts(path) == [(0, "a"), (2, "c")]
        [(number, told)] = reasons(path)
        assert number == 1
        assert told.startswith(reason)

    @pytest.mark.parametrize("behind", [0, 20_000])
    def test_a_quote_that_is_never_closed(self, write: Write, behind: int) -> None:
        """Costs its own line only: reading goes on at the next, at the file's end as before many other rows."""
        path = write("a.csv", b'id,text\n1,"a\n' + b"2,some words\n" * (behind + 1))
        assert texts(path)[0] == (1, "some words")
        assert len(texts(path)) == behind + 1
        assert [number for number, _ in reasons(path)] == [0]

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty; a CSV file begins with"),
            (b"a,b\n1,2\n", "has no column 'text'; its header is 'a', 'b'"),
            (b"text,text\n1,2\n", "has several columns 'text'"),
            (b"te\xffxt\n1\n", "holds no column names: byte 2"),
            (b'"text\n', "holds no column names: the line is no CSV record"),
        ],
    )
    def test_headers(self, write: Write, content: bytes, words: str) -> None:
        """A header that can't serve is an error at once."""
        with pytest.raises(DataError, match=words):
            rows(write("a.csv", content))

    def test_nothing_behind_the_header(self, write: Write) -> None:
        """No rows, no error."""
        assert rows(write("a.csv", b"text\n")) == []


class TestParquet:
    def test_values(self, write: Write) -> None:
        """Strings are texts, plain or by dictionary; null and bad UTF-8 are bad rows."""
        broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
        text = pa.chunked_array([pa.array(["a", None, "c" * 100_001]), broken, pa.array(["é"])])
        path = write("a.parquet", pa.table({"text": text, "id": [1, 2, 3, 4, 5]}))
        assert texts(path) == [(0, "a"), (4, "é")]
        assert [number for number, _ in reasons(path)] == [1, 2, 3]
        assert reasons(path)[2] == (3, "text: byte 0 is no UTF-8")
        coded = write("b.parquet", pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}))
        assert texts(coded) == [(0, "a"), (1, "b"), (2, "a")]

    @pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all, but long enough to have a footer PAR1"])
    def test_not_parquet(self, write: Write, content: bytes) -> None:
        """One line that says so."""
        with pytest.raises(DataError, match=r"a\.parquet (is no Parquet file|can't be read)"):
            rows(write("a.parquet", content))

    def test_damaged(self, write: Write) -> None:
        """Where a page can't be decoded the error says behind which row."""
        path = write("a.parquet", pa.table({"text": [f"text {i}" for i in range(50)]}))
        content = bytearray(path.read_bytes())
        content[4 : len(content) // 3] = b"\xff" * (len(content) // 3 - 4)
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"is damaged behind row \d+"):
            rows(path)

    def test_columns(self, write: Write) -> None:
        """A column that is absent is an error that names those there are."""
        with pytest.raises(DataError, match="has no column 'text'; it has 'a', 'b'"):
            rows(write("a.parquet", pa.table({"a": ["x"], "b": ["y"]})))


TEXTS = ["a", "b, c", "", 'd"e', "f\ng", "é" * 30, "日本"]


@given(st.lists(st.sampled_from(TEXTS), max_size=30), st.integers(1, 7), st.sampled_from(["jsonl", "csv", "parquet"]))
def test_windows_are_the_same_from_any_place(
    tmp_path_factory: pytest.TempPathFactory, values: list[str], window_rows: int, kind: str
) -> None:
    """What a run that goes on reads, and what another node reads, is what one run would have read."""
    import csv

    path = tmp_path_factory.mktemp("w") / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(pa.table({"text": pa.array(values, pa.string())}), path, row_group_size=3)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            if kind == "csv":
                csv.writer(file).writerows([["text", "n"], *([text, "1"] for text in values)])
            else:
                file.writelines(json.dumps({"text": text}) + "\n" for text in values)
    reader = open_reader(source(path, window_rows=window_rows))
    all_windows = list(reader.windows(Place()))
    assert [row.number for window in all_windows for row in window.rows] == list(range(len(values)))
    assert [window.start for window in all_windows] == list(reader.places(Place()))
    for i, window in enumerate(all_windows):
        assert list(open_reader(source(path, window_rows=window_rows)).windows(window.start)) == all_windows[i:]
    if all_windows:
        assert all_windows[-1].end.offset == reader.total


def test_long_rows_make_small_windows(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window ends at its bytes too, so that memory stays flat."""
    from tokenalign.bulk import text_files

    monkeypatch.setattr(text_files, "WINDOW_BYTES", 100)
    path = write("a.jsonl", b"".join(b'{"text": "%s"}\n' % (b"a" * 60) for _ in range(8)))
    windows = list(open_reader(source(path, window_rows=1_000)).windows(Place()))
    assert [len(window.rows) for window in windows] == [2, 2, 2, 2]


def test_formats() -> None:
    """Known by the name, or asked for."""
    assert [format_of(Path(f"a.{end}")) for end in ("jsonl", "ndjson", "CSV", "tsv", "parquet")] == [
        "jsonl", "jsonl", "csv", "tsv", "parquet",
    ]  # fmt: skip
    with pytest.raises(InputError, match="say its format with --format"):
        format_of(Path("a.txt"))


def test_no_file(tmp_path: Path) -> None:
    """Told before anything else is done."""
    with pytest.raises(InputError, match="does not exist"):
        open_reader(source(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(InputError, match="is no regular file"):
        open_reader(source(tmp_path / "b.jsonl"))
    with pytest.raises(DataError, match="can't be read"):
        file_identity(tmp_path / "a.jsonl")


def test_identity_sees_a_change(write: Write) -> None:
    """Of the size or of the beginning."""
    first = file_identity(write("a.jsonl", b"a"))
    assert first == file_identity(write("b.jsonl", b"a")) | {"modified_ns": first["modified_ns"]}
    assert first["head_sha256"] != file_identity(write("c.jsonl", b"b"))["head_sha256"]
    assert first["size"] != file_identity(write("c.jsonl", b"aa"))["size"]
    assert reading.HEAD_BYTES >= 2**16


def test_snippets() -> None:
    """Short, and always encodable."""
    assert snippet(b"a\xff" * 300)[:9] == "a\\xffa\\xf"
    assert len(snippet(b"a\xff" * 300)) == 200
    assert snippet("a\ud800") == "a\\ud800"
    assert snippet(7) == "7"
