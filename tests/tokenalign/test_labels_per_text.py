"""Different labels for each text of a call, and a caller's own words around labels."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.errors import InputError
from tokenalign.labels import LabelSet, has_label_sets, label_sets

TEXTS = ["card twice", "cash", "not received, e\u0301 \U0001f600"]
SETS: list[Any] = [
    ["card", "cash"],
    ["not received", "card", {"name": "n", "description": ["cash", "twice"]}],
    ("a", "b"),
]


@given(st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from(SETS)), min_size=1, max_size=6))
def test_each_text_has_the_answer_that_it_has_alone(bert_classifier: TokenAlignClassifier, pairs: Any) -> None:
    """Scores, names and matches are those of a call for that text and its labels."""
    answers = bert_classifier([t for t, _ in pairs], [s for _, s in pairs], explain="all", return_logits=True)
    for (text, labels), answer in zip(pairs, answers, strict=True):
        alone = bert_classifier(text, labels, explain="all", return_logits=True)
        assert alone["logits"] == pytest.approx(answer["logits"], abs=1e-4)
        assert list(alone["scores"]) == list(answer["scores"])
        assert [m["span"] for m in alone["matches"]] == [m["span"] for m in answer["matches"]]


def test_texts_are_encoded_in_one_pass(bert_classifier: TokenAlignClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all labels, once for all texts, however many lists there are."""
    bert_classifier.clear_label_cache()
    calls: list[int] = []
    encode = bert_classifier.backbone.encode

    def counted(tokens: Any, **options: Any) -> Any:
        calls.append(len(tokens))
        return encode(tokens, **options)

    monkeypatch.setattr(bert_classifier.backbone, "encode", counted)
    bert_classifier(TEXTS, SETS)
    assert calls == [6, 3]


def test_what_is_a_list_for_each_text() -> None:
    """A list of nothing but lists, tuples and label sets; anything else is one list for all."""
    one = LabelSet.of(["a", "b"])
    assert has_label_sets([["a", "b"], ("c", "d"), one])
    for labels in (["a"], [], one, [["a"], "b"], "ab", None, [{"name": "a"}]):
        assert not has_label_sets(labels)
    assert label_sets(["a", "b"], 5) == (one,)
    assert label_sets([one, ["a", "b"]], 2) == (one, one)


@pytest.mark.parametrize(
    ("labels", "loc", "word"),
    [
        ([["a", "b"]], ("labels",), "1 lists of labels given for 2 texts"),
        ([["a", "b"], ["c", "d"], ["e", "f"]], ("labels",), "3 lists of labels given for 2 texts"),
        ([["a", "b"], ["only"]], ("labels", 1), "at least 2 needed"),
        ([["a", "b"], ["c", ""]], ("labels", 1, 1), "empty"),
        ([["a", "b"], ["c", "\u200b"]], ("labels", 1, 1), "no character"),
        (
            [["a", {"name": "b", "description": ["x", "\u200b"]}], ["c", "d"]],
            ("labels", 0, 1, "description", 1),
            "no ch",
        ),
        ([["a", "b"], "cd"], ("labels", 0), "must be a string or an object"),
    ],
)
def test_bad_lists(bert_classifier: TokenAlignClassifier, labels: Any, loc: tuple[str | int, ...], word: str) -> None:
    """The list and the label in it are named."""
    with pytest.raises(InputError, match=word) as caught:
        bert_classifier(["card", "cash"], labels)
    assert caught.value.loc == loc


def test_warnings_are_of_each_texts_own_labels(bert_classifier: TokenAlignClassifier) -> None:
    """A label that was cut is told in the answer to its text, at its place."""
    first, second = bert_classifier(["card", "cash"], [["a", "b"], ["a", "card " * 130]])
    assert first["warnings"] == []
    assert [w["loc"] for w in second["warnings"]] == [["labels", 1, 1]]


def test_a_text_of_several_lists_has_several_answers(bert_classifier: TokenAlignClassifier) -> None:
    """Equal texts share their encoding, not their candidates."""
    first, second = bert_classifier(["card", "card"], [["a", "b"], ["c", "d"]])
    assert set(first["scores"]) == {"a", "b"}
    assert set(second["scores"]) == {"c", "d"}


def test_words_around_a_label_change_its_score_and_are_not_scored(bert_classifier: TokenAlignClassifier) -> None:
    """They are context: only the label's own tokens match; the model's own template is kept apart from the caller's."""
    labels = ["cash", "twice"]
    plain = bert_classifier("card twice", labels, return_logits=True)
    worded = bert_classifier(
        "card twice", labels, return_logits=True, explain="all", label_template="this card was {label}."
    )
    assert worded["logits"] != pytest.approx(plain["logits"], abs=1e-3)
    assert {match["token"] for match in worded["matches"]} == {"cash", "twice"}
    assert bert_classifier("card twice", labels, return_logits=True) == plain
    assert bert_classifier("card twice", labels, return_logits=True, label_template="{label}") == plain


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("about", "exactly once"),
        ("{label} or {label}", "exactly once"),
        (3, "must be a string"),
        ("", "empty"),
        ("a [SEP] {label}", "control token"),
        ("card " * 200 + "{label}", "max_length is 128"),
        ("\ud800 {label}", "surrogate"),
    ],
)
def test_bad_templates(bert_classifier: TokenAlignClassifier, template: Any, word: str) -> None:
    """The argument is named, and what is wrong with it."""
    with pytest.raises(InputError, match=word) as caught:
        bert_classifier("card", ["a", "b"], label_template=template)
    assert caught.value.loc == ("label_template",)


def test_an_abstention_keeps_scores_and_matches(bert_classifier: TokenAlignClassifier) -> None:
    """No label is named, and all else is as without a limit; a margin counts labels that top_k leaves out."""
    plain = bert_classifier("card", ["a", "b", "c"], explain=True)
    answer = dict(bert_classifier("card", ["a", "b", "c"], explain=True, top_k=1, min_margin=1.0))
    assert answer["label"] is None
    assert answer["score"] == plain["score"]
    assert answer["matches"] == plain["matches"]
    first, second, _ = plain["scores"].values()
    assert answer["abstained"] == {
        "reason": "min_margin",
        "value": pytest.approx(first - second, abs=1e-6),
        "limit": 1.0,
    }
    assert "abstained" not in bert_classifier("card", ["a", "b"], min_score=0.0)
