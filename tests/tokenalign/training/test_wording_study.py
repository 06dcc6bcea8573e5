"""The same labels in other words."""

import json
from pathlib import Path

import numpy as np
import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.errors import DataError
from tokenalign.training.data import Example
from tokenalign.training.held_out import TestSet
from tokenalign.training.wording_study import OWN_WORDING, read_wordings, study_wordings

TEST = TestSet.of(
    [
        Example("my card was charged", "card_charged"),
        Example("cash not received", "no_cash"),
        Example("cash", "no_cash"),
    ],
    ["card_charged", "no_cash"],
)


def test_each_wording_is_scored_as_a_caller_would(bert_classifier: TokenAlignClassifier) -> None:
    """Accuracy, NLL and the right label's probability of each formulation are those of calling with its words."""
    wordings = {
        "rich": {"card_charged": ["card was charged", "charged twice"], "no_cash": "cash that was not received"}
    }
    found = study_wordings(bert_classifier, TEST, wordings)
    assert list(found) == [OWN_WORDING, "rich"]
    own = [{"name": "card_charged", "description": "card charged"}, {"name": "no_cash", "description": "no cash"}]
    rich = [{"name": name, "description": words} for name, words in wordings["rich"].items()]
    for wording, labels in ((OWN_WORDING, own), ("rich", rich)):
        answers = bert_classifier(list(TEST.texts), labels)
        right = np.array(
            [answer["scores"][TEST.labels.names[t]] for answer, t in zip(answers, TEST.targets, strict=True)]
        )
        hits = [answer["label"] == TEST.labels.names[t] for answer, t in zip(answers, TEST.targets, strict=True)]
        assert found[wording]["accuracy"] == pytest.approx(np.mean(hits))
        assert found[wording]["right_probability"] == pytest.approx(right.mean(), abs=1e-4)
        assert found[wording]["nll"] == pytest.approx(-np.log(right).mean(), abs=1e-3)
    assert found["rich"] != found[OWN_WORDING]


def test_formulations_are_the_keys_of_the_lines(tmp_path: Path) -> None:
    """Every key but the name is a formulation, of one description or several."""
    path = tmp_path / "words.jsonl"
    rows = [{"name": "a", "short": "x", "rich": ["y", "z"]}, {"name": "b", "rich": "v", "short": "w"}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_wordings(path) == {"short": {"a": "x", "b": "w"}, "rich": {"a": ["y", "z"], "b": "v"}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no labels; write one JSON object a line"),
        ('{"name": "a"\n', r"words\.jsonl:1: is no JSON"),
        ('{"name": "a"}\n', r":1: must be an object with .name. and at least one wording"),
        ('{"short": "a", "rich": "b"}\n', r":1: must be an object with .name."),
        ('{"name": "a", "short": "x", "rich": "y"}\n\n{"name": "b", "short": "z"}\n', r":3: has no 'rich'"),
        ('{"name": "a", "short": "x"}\n{"name": "a", "short": "z"}\n', r":2: words label 'a' again"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, content: str, words: str) -> None:
    """The line is named, and what it lacks."""
    path = tmp_path / "words.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        read_wordings(path)


def test_every_label_needs_its_words(bert_classifier: TokenAlignClassifier) -> None:
    """A label without any, or two labels with the same, are told with the formulation."""
    with pytest.raises(DataError, match=r"don't have label 'no_cash' \(1 of 2 labels"):
        study_wordings(bert_classifier, TEST, {"short": {"card_charged": "x"}})
    with pytest.raises(DataError, match="wording 'short': "):
        study_wordings(bert_classifier, TEST, {"short": {"card_charged": "x", "no_cash": "x"}})
