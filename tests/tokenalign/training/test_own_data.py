"""A user's own files: what is read of them, and what is told of what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenalign.errors import ConfigError, DataError, InputError
from tokenalign.training.data import Example
from tokenalign.training.own_data import OwnFiles, read_examples, read_own, read_texts

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of the test's folder and gives its path."""

    def to(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return to


def test_every_form_gives_the_same_examples(write: Write) -> None:
    """CSV, TSV and JSON Lines, other columns between, fields quoted over lines, a byte order mark, white space."""
    expected = (Example("I was charged, twice", "double charge"), Example("where\nis it", "card_arrival"))
    csv = '\ufefftext,id,label\n"I was charged, twice",1,double charge\n"where\nis it",2, card_arrival \n'
    assert read_examples(write("a.csv", csv)) == expected
    tsv = 'label\ttext\ndouble charge\tI was charged, twice\ncard_arrival\t"where\nis it"\n'
    assert read_examples(write("a.tsv", tsv)) == expected
    rows = [{"text": example.text, "label": example.label, "more": [1]} for example in expected]
    assert read_examples(write("a.jsonl", "\n\n".join(map(json.dumps, rows)))) == expected
    renamed = csv.replace("text,id,label", "message,id,intent")
    assert read_examples(write("b.csv", renamed), "message", "intent") == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text,label\nhi,a\n ,b\n", r"a\.csv, row 2: text: is empty"),
        ("a.csv", "text,label\nhi,a\nho,\n", r"row 2: label: is empty; name the text's label; correct or remove"),
        ("a.csv", "text,label\nhi,a,b\n", r"row 1: has 3 fields, the header has 2"),
        ("a.csv", "text,category\nhi,a\n", r"no column 'label'; its header is 'text', 'category'"),
        ("a.csv", "text,label\n", "has no rows"),
        ("a.csv", "", "is empty; a CSV file begins with a line of column names"),
        ("a.csv", b"text,label\nh\xff,a\n", r"row 1: byte 1 of the record is no UTF-8"),
        ("a.csv", "text,label\nh\x00i,a\n", r"row 1: text: has a NUL character at position 1"),
        ("a.csv", b"\xff\xfet\x00", "is UTF-16"),
        ("a.jsonl", '{"text": "hi", "label": "a"}\n{"text": "ho"}\n', r"a\.jsonl, line 2: label: is missing"),
        ("a.jsonl", '{"text": "hi", "label": 3}\n', r"line 1: label: must be a string, not 3; write"),
        ("a.jsonl", '{"text": 3, "label": "a"}\n', r"line 1: text: must be a string, not int"),
        ("a.jsonl", '{"text": "hi", "label": "a"\n', r"line 1: the line is no JSON"),
        ("a.jsonl", "[1]\n", r"line 1: the line is no JSON object, but list"),
        ("a.csv", "text,label\nhi,Card Arrival\nho,card_arrival\n", "'Card Arrival' and 'card_arrival' read the same"),
        ("a.csv", "text,label\n" + ",\n" * 9, r"row 5: .*\(and 4 more bad rows\)"),
    ],
)
def test_what_is_wrong_with_a_file(write: Write, name: str, content: str | bytes, words: str) -> None:
    """File, row and column are named, and what to do."""
    with pytest.raises(DataError, match=words):
        read_examples(write(name, content))


def test_files_that_are_none(tmp_path: Path, write: Write) -> None:
    """An absent file, a folder, and a name that tells no format."""
    with pytest.raises(InputError, match="does not exist"):
        read_examples(tmp_path / "gone.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match="is no regular file"):
        read_examples(tmp_path / "folder.csv")
    with pytest.raises(InputError, match="ends with none of"):
        read_examples(write("a.xlsx", "x"))


def test_labels_describe_themselves(write: Write) -> None:
    """Without a file of descriptions a label's name as words is its description; a number describes nothing."""
    own = read_own(OwnFiles(data=write("a.csv", "text,label\nhi,card_arrival\nho,lost card\n")))
    assert own.descriptions == {"card_arrival": ("card arrival",), "lost card": ("lost card",)}
    with pytest.raises(DataError, match=r"label '0' is a number.*\(and 1 more label\).*--labels-file"):
        read_own(OwnFiles(data=write("b.csv", "text,label\nhi,0\nho,1\n")))


def test_descriptions_from_a_file(write: Write) -> None:
    """Several for a label; every label needs a line, and labels without messages are left out."""
    data = write("a.csv", "text,label\nhi,0\nho,1\n")
    lines = [
        {"name": "0", "description": ["greeting", "saying hello"]},
        {"name": "1", "description": "x"},
        {"name": "2", "description": "y"},
    ]
    labels = write("labels.jsonl", "\n".join(map(json.dumps, lines)))
    own = read_own(OwnFiles(data=data, labels=labels))
    assert own.descriptions == {"0": ("greeting", "saying hello"), "1": ("x",)}
    with pytest.raises(DataError, match=r"does not describe label '1'.*the name written alike"):
        read_own(OwnFiles(data=data, labels=write("few.jsonl", json.dumps(lines[0]) + "\n2\n")))
    with pytest.raises(ConfigError, match=r"twins\.jsonl:2: .*is given twice"):
        read_own(OwnFiles(data=data, labels=write("twins.jsonl", json.dumps(lines[1]) + "\nx\n")))


def test_a_test_file_has_the_same_labels(write: Write) -> None:
    """A label that the data doesn't have is an error, and both files' hashes are kept."""
    data, test = write("a.csv", "text,label\nhi,a\nho,b\n"), write("test.csv", "text,label\nhey,a\n")
    own = read_own(OwnFiles(data=data, test=test))
    assert [example.text for example in own.corpus.examples["test"]] == ["hey"]
    assert own.provenance.keys() == {"data", "test", "columns"}
    assert len(own.provenance["test"]["sha256"]) == 64
    with pytest.raises(DataError, match=r"label 'A' does not occur in .*a\.csv"):
        read_own(OwnFiles(data=data, test=write("other.csv", "text,label\nhey,A\n")))


def test_texts_alone(write: Write) -> None:
    """Texts that no label fits need no label column."""
    assert read_texts(write("a.csv", "text\nwho won\nwhy\n")) == ("who won", "why")
    with pytest.raises(DataError, match="row 1: text: is empty"):
        read_texts(write("b.csv", 'text,x\n"",1\n'))
