"""From logits to answers: softmax, order, spans and warnings."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenalign.config import ModelConfig, MultiLabelCalibration
from tokenalign.errors import InputError, NumericalError
from tokenalign.labels import LabelSet
from tokenalign.results import (
    LabelAlignment,
    check_explain,
    check_multi_label,
    check_top_k,
    classification,
    explained_labels,
    independent_scores,
    label_scores,
    label_warnings,
    match_list,
    ranking,
    softmax,
    truncation_report,
    visible_span,
    window_report,
)
from tokenalign.text import TokenizedTexts, Truncation, Windowed
from tokenalign.tokens import TokenBatch

LABELS = LabelSet.of(["a", {"name": "b", "description": ["bee", "the letter"]}, "c"])


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=50))
def test_softmax_sums_to_one_and_keeps_the_order(logits: list[float]) -> None:
    """Probabilities over all labels, in the order of the logits."""
    scores = softmax(floats(*logits))
    assert scores.astype(np.float64).sum() == pytest.approx(1, abs=1e-6)
    assert all(scores[i] >= scores[j] for i in range(len(logits)) for j in range(len(logits)) if logits[i] > logits[j])


def test_softmax_is_by_row() -> None:
    """Each text is by itself."""
    np.testing.assert_allclose(
        softmax(np.log(np.array([[1, 3], [1, 1]], dtype=np.float32))), [[0.25, 0.75], [0.5, 0.5]]
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_softmax_refuses_what_is_no_number(value: float) -> None:
    """A NaN never becomes an answer."""
    with pytest.raises(NumericalError, match="logits"):
        softmax(floats(1.0, value))


CALIBRATION = MultiLabelCalibration(scale=2.0, bias=-1.0)


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=50))
def test_independent_scores_are_of_each_logit_alone(logits: list[float]) -> None:
    """Between 0 and 1, the same whatever else is there, in the order of the logits."""
    scores = independent_scores(floats(*logits), CALIBRATION)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert scores.tolist() == [independent_scores(floats(x), CALIBRATION)[0] for x in logits]
    assert all(scores[i] >= scores[j] for i in range(len(logits)) for j in range(len(logits)) if logits[i] > logits[j])
    assert independent_scores(floats(0.5, 1.0), CALIBRATION).tolist() == pytest.approx([0.5, 0.7310586])


def test_label_scores_follow_the_calibration() -> None:
    """A softmax without one; with one, each by itself; NaN is refused either way."""
    logits = floats(1, 2)
    assert label_scores(logits, None).tolist() == softmax(logits).tolist()
    assert label_scores(logits, CALIBRATION).tolist() == independent_scores(logits, CALIBRATION).tolist()
    with pytest.raises(NumericalError, match="logits"):
        label_scores(floats(np.nan), CALIBRATION)


def test_multi_label_needs_a_calibration() -> None:
    """Its own when there is one; else an error that says how to fit one; other values than a boolean are refused."""
    bare = ModelConfig.parse({"name": "mine", "backbone": {"reference": "x"}, "backbone_width": 8})
    fitted = bare.model_copy(update={"multi_label": CALIBRATION})
    assert check_multi_label(True, fitted) == CALIBRATION
    assert check_multi_label(False, fitted) is check_multi_label(False, bare) is None
    with pytest.raises(InputError, match=r"'mine' has no calibration .*tokenalign calibrate") as caught:
        check_multi_label(True, bare)
    assert caught.value.loc == ("multi_label",)
    with pytest.raises(InputError, match="true or false; it is 1"):
        check_multi_label(1, fitted)


def test_ranking_keeps_ties_in_the_callers_order() -> None:
    """Best first; equal logits stay as they were sent; top_k only shortens."""
    logits = floats(1, 3, 1, 3, 2)
    assert ranking(logits, None).tolist() == [1, 3, 4, 0, 2]
    assert ranking(logits, 2).tolist() == [1, 3]
    assert ranking(logits, 99).tolist() == [1, 3, 4, 0, 2]
    many = np.tile(floats(0, 1), 500)  # small arrays are sorted in place, where any kind of sort keeps ties
    assert ranking(many, None).tolist() == [*range(1, 1_000, 2), *range(0, 1_000, 2)]


@pytest.mark.parametrize("top_k", [0, -1, 1.0, "2", True])
def test_bad_top_k(top_k: Any) -> None:
    """Only a whole number of at least 1, or None."""
    with pytest.raises(InputError, match="at least 1") as caught:
        check_top_k(top_k)
    assert caught.value.loc == ("top_k",)


@pytest.mark.parametrize("explain", ["top", "", 1, 0, None, ["all"]])
def test_bad_explain(explain: Any) -> None:
    """Only true, false or "all"; a misspelt word is not taken for true."""
    with pytest.raises(InputError, match='"all"') as caught:
        check_explain(explain)
    assert caught.value.loc == ("explain",)


def test_explained_labels() -> None:
    """None, the best one, or all that are returned."""
    order = np.array([2, 0, 1])
    assert explained_labels(order, False) == []
    assert explained_labels(order, True) == [2]
    assert explained_labels(order, "all") == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "span", "visible"),
    [
        ("pay now", (3, 7), [4, 7]),
        ("pay \n", (0, 5), [0, 3]),
        ("pay", (0, 3), [0, 3]),
        ("   ", (0, 3), [0, 3]),
        ("a  b", (1, 3), [1, 3]),
    ],
)
def test_visible_span(text: str, span: tuple[int, int], visible: list[int]) -> None:
    """White space at the ends is left out, unless there is nothing else."""
    assert visible_span(text, span) == visible


def test_matches_carry_the_words_of_both_sides() -> None:
    """The name is the label's, the token is of the description that matched, the spans are code points."""
    alignment = LabelAlignment(
        description=2,
        label_spans=np.array([[0, 3], [3, 10]], dtype=np.int32),
        key_index=np.array([1, 0]),
        similarity=floats(0.5, -0.25),
        median=floats(0, 0),
        contribution=floats(2, -1),
    )
    found = match_list(LABELS, [alignment], "das β", np.array([[0, 3], [3, 5]], dtype=np.int32))
    assert found == [
        {
            "label": "b",
            "description": "the letter",
            "token": "the",
            "label_span": [0, 3],
            "span": [4, 5],
            "text": "β",
            "similarity": 0.5,
            "contribution": 2.0,
        },
        {
            "label": "b",
            "description": "the letter",
            "token": "letter",
            "label_span": [4, 10],
            "span": [0, 3],
            "text": "das",
            "similarity": -0.25,
            "contribution": -1.0,
        },
    ]


def windows_of(*kept: int) -> Windowed:
    """One text in windows of so many scored tokens each, the token at place i with the span (i, i + 1)."""
    lengths = np.array(kept, dtype=np.int32)
    places = np.arange(sum(kept), dtype=np.int32)
    tokens = TokenBatch(places, lengths, np.ones(len(places), dtype=np.bool_))
    texts = TokenizedTexts(tokens, np.stack([places, places + 1], axis=1), (None,) * len(kept))
    return Windowed(texts, np.array([len(kept)], dtype=np.int32))


@pytest.mark.parametrize(
    ("key_index", "contribution", "best"),
    [
        ([0, 3, 4], [2, 1.5, 1], 1),
        ([0, 3, 4], [3, 1, 1], 0),
        ([5, 5], [1, 1], 2),
        ([0, 2], [1, 1], 0),
        ([4], [-3], 1),
    ],
)
def test_the_best_window_carries_the_largest_sum(key_index: list[int], contribution: list[float], best: int) -> None:
    """Summed over the matches in each window, the first of equals; one without a match is never the best."""
    n = len(key_index)
    alignment = LabelAlignment(
        0, np.zeros((n, 2), np.int32), np.array(key_index), floats(*[0] * n), floats(*[0] * n), floats(*contribution)
    )
    report = window_report(windows_of(2, 3, 1), 0, alignment)
    assert report == {"count": 3, "best": best, "spans": [[0, 2], [2, 5], [5, 6]]}


def test_truncation_report() -> None:
    """The numbers as they are, or None."""
    assert truncation_report(None) is None
    assert truncation_report(Truncation(310, 128, 541)) == {"tokens": 310, "used": 128, "cut_at": 541}


def tokenized(*sequences: list[int], truncations: tuple[Truncation | None, ...] | None = None) -> TokenizedTexts:
    ids = np.array([i for s in sequences for i in s], dtype=np.int32)
    lengths = np.array([len(s) for s in sequences], dtype=np.int32)
    tokens = TokenBatch(ids, lengths, np.ones(len(ids), dtype=np.bool_))
    return TokenizedTexts(tokens, np.zeros((len(ids), 2), dtype=np.int32), truncations or (None,) * len(sequences))


def test_warnings_name_labels_not_descriptions() -> None:
    """A cut description and ones with equal ids are told by the position of their label."""
    cut = (None, None, None, Truncation(200, 128, 400))
    found = label_warnings(LABELS, tokenized([1, 2], [3], [3], [1, 2], truncations=cut))
    assert [(w["loc"], w["type"]) for w in found] == [
        (["labels", 2], "truncated"),
        (["labels", 1], "indistinguishable"),
        (["labels", 2], "indistinguishable"),
    ]
    assert "200 tokens" in found[0]["message"]
    assert "128" in found[0]["message"]
    assert "number 0" in found[2]["message"]


def test_equal_sequences_need_all_ids_equal() -> None:
    """A prefix, or the same ids cut elsewhere, is another text."""
    assert tokenized([1, 2], [1], [2, 1, 2], [1, 2, 1]).equal_sequences() == []
    assert tokenized([1], [2], [1], [1]).equal_sequences() == [(0, 2), (0, 3)]


def answer(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "top_k": None,
        "return_logits": False,
        "truncation": None,
        "matches": None,
        "warnings": [],
    }
    return classification(LABELS, floats(1, 3, 2), floats(0.1, 0.6, 0.3), **values | changes)


def test_classification_is_best_first() -> None:
    """Label and score are the first of scores; what wasn't asked for is absent."""
    got = answer()
    assert list(got["scores"]) == ["b", "c", "a"]
    assert got["label"] == "b"
    assert got["score"] == got["scores"]["b"] == pytest.approx(0.6)
    assert got.keys() == {"label", "score", "scores", "truncation", "warnings"}


def test_classification_with_everything() -> None:
    """Logits in the order of the scores, top_k shortens both."""
    got = answer(return_logits=True, top_k=2, truncation=Truncation(9, 8, 7), matches=[])
    assert got["logits"] == {"b": 3.0, "c": 2.0}
    assert list(got["scores"]) == ["b", "c"]
    assert got["matches"] == []
    assert got["truncation"] == {"tokens": 9, "used": 8, "cut_at": 7}


def test_an_abstention_leaves_the_scores() -> None:
    """The label is None, the reason is given, the best score stays."""
    abstained = {"reason": "min_score", "value": 0.6, "limit": 0.7}
    got = answer(abstained=abstained)
    assert got["label"] is None
    assert got["abstained"] == abstained
    assert got["score"] == pytest.approx(0.6)
    assert list(got["scores"]) == ["b", "c", "a"]
