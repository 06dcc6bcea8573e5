"""Files of texts with one label or several."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenalign.errors import DataError, InputError
from tokenalign.training.labelled_data import LabelledFiles, label_matrix, read_labelled


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_label_a_text(tmp_path: Path) -> None:
    """The column `label` says so by its name; labels stand in the order in which they are met."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": "b"}, {"text": "y", "label": "a"}])
    data = read_labelled(LabelledFiles(data=path))
    assert (data.mode, data.labels) == ("single_label", ("b", "a"))
    assert label_matrix(data.texts, data.labels).tolist() == [[True, False], [False, True]]


def test_several_labels_a_text(tmp_path: Path) -> None:
    """A list in JSON, joined by a bar in CSV; a name may hold a comma, twice is once, and none is an answer too."""
    rows = [{"text": "x", "labels": ["a,b", "c", "c"]}, {"text": "y", "labels": []}]
    data = read_labelled(LabelledFiles(data=jsonl(tmp_path / "a.jsonl", rows)))
    csv = tmp_path / "a.csv"
    csv.write_text('text,labels\nx,"a,b | c|c"\ny,\n')
    again = read_labelled(LabelledFiles(data=csv))
    assert (data.mode, data.labels) == (again.mode, again.labels) == ("multi_label", ("a,b", "c"))
    assert data.texts == again.texts
    assert [text.labels for text in data.texts] == [("a,b", "c"), ()]


def test_columns_of_other_names(tmp_path: Path) -> None:
    """Which of the two is given says what the task is."""
    path = tmp_path / "a.csv"
    path.write_text("text,label,labels,tags\nx,a,a|b,c\ny,b,b,d\n")
    assert read_labelled(LabelledFiles(data=path, labels_column="tags")).labels == ("c", "d")
    assert read_labelled(LabelledFiles(data=path, label_column="tags")).mode == "single_label"
    with pytest.raises(DataError, match="both 'label' and 'labels' as a column; say which with --label-column"):
        read_labelled(LabelledFiles(data=path))
    with pytest.raises(InputError, match="not both"):
        read_labelled(LabelledFiles(data=path, label_column="label", labels_column="tags"))
    neither = jsonl(tmp_path / "b.jsonl", [{"text": "x", "intent": "a"}])
    with pytest.raises(DataError, match="neither 'label' nor 'labels'"):
        read_labelled(LabelledFiles(data=neither))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "z", "labels": "a\x00"}, "line 2: labels: has a NUL"),
        ({"text": "z", "labels": [1]}, "line 2: labels: must be a string, not 1"),
        ({"text": "z", "labels": {"a": 1}}, "line 2: labels: must be a list of names"),
        ({"text": "z", "labels": ["a", " "]}, "line 2: labels: is empty"),
        ({"text": "z"}, "line 2: labels: is missing"),
        ({"text": " ", "labels": ["a"]}, "line 2: text: is empty"),
    ],
)
def test_a_bad_row_is_quoted(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    """With its place; nothing is left out in silence."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "labels": ["a"]}, row])
    with pytest.raises(DataError, match=said):
        read_labelled(LabelledFiles(data=path))


def test_labels_that_read_the_same_are_refused(tmp_path: Path) -> None:
    """They would be trained as two."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "labels": ["Card"]}, {"text": "y", "labels": ["card"]}])
    with pytest.raises(DataError, match="read the same"):
        read_labelled(LabelledFiles(data=path))


def test_a_test_file_has_the_same_labels(tmp_path: Path) -> None:
    """A label that nothing was trained on can't be tested; both files are hashed."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": "a"}, {"text": "y", "label": "b"}])
    test = jsonl(tmp_path / "t.jsonl", [{"text": "z", "label": "c"}])
    with pytest.raises(DataError, match="label 'c' is unknown to"):
        read_labelled(LabelledFiles(data=path, test=test))
    jsonl(test, [{"text": "z", "label": "a"}])
    data = read_labelled(LabelledFiles(data=path, test=test))
    assert data.test is not None
    assert {"data", "test", "columns"} == data.provenance.keys()
    assert len(data.provenance["test"]["sha256"]) == 64
