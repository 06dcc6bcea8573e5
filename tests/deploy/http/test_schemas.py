"""The native API's bodies: what is taken and what is refused, with the place of the first thing at fault."""

import json
from typing import Any

import pytest

from deploy.http.errors import to_http
from deploy.http.schemas import ClassifyQuery, ClassifyRequest, parse_classify
from deploy.settings import LimitSettings
from tokenalign.abstention import Thresholds
from tokenalign.errors import InputError

LIMITS = LimitSettings(max_texts=3, max_labels=4, max_text_chars=20)
GOOD: dict[str, Any] = {"text": "card", "labels": ["a", "b"]}


def parse(**changes: Any) -> ClassifyQuery:
    return parse_classify({key: value for key, value in (GOOD | changes).items() if value is not ...}, LIMITS)


class TestGood:
    def test_one_text(self) -> None:
        """A text with labels is all it takes; the rest has its defaults."""
        query = parse()
        assert (query.texts, query.single) == (("card",), True)
        assert query.labels.names == ("a", "b")
        assert (query.explain, query.return_logits, query.top_k) == (False, False, None)

    def test_everything(self) -> None:
        """Every key of a request arrives."""
        labels = ["a", {"name": "b"}, {"name": "c", "description": "C"}, {"name": "d", "description": ["D", "DD"]}]
        query = parse(text=..., texts=["x", "y"], labels=labels, explain="all", return_logits=True, top_k=2)
        more = parse(
            multi_label=True,
            min_score=0.5,
            min_margin=0,
            label_template="a {label}",
            long_text="window",
            window_stride=3,
            model="other",
        )
        assert (more.multi_label, more.thresholds, more.label_template) == (True, Thresholds(0.5, 0.0), "a {label}")
        assert (more.long_text, more.window_stride, more.model, more.keep_labels) == ("window", 3, "other", True)
        assert (query.texts, query.single) == (("x", "y"), False)
        assert query.labels.descriptions == ("a", "b", "C", "D", "DD")
        assert (query.explain, query.return_logits, query.top_k) == ("all", True, 2)

    @pytest.mark.parametrize("explain", [True, False, "all"])
    def test_explain(self, explain: Any) -> None:
        """The three values that explain takes."""
        assert parse(explain=explain).explain == explain

    def test_at_the_limits(self) -> None:
        """As many texts, labels and characters as are allowed."""
        query = parse(text=..., texts=["x" * 20] * 3, labels=["a", "b", "c", "d" * 20])
        assert len(query.texts) == 3

    def test_one_label_with_logits(self) -> None:
        """A single label is enough where logits are asked for."""
        assert len(parse(labels=["a"], return_logits=True).labels) == 1

    def test_the_documented_example(self) -> None:
        """The example of the API's documentation is a good request."""
        example = ClassifyRequest.model_json_schema()["example"]
        assert parse_classify(example, LimitSettings()).single


BAD: list[tuple[dict[str, Any], tuple[str | int, ...], str]] = [
    ({"text": ...}, ("text",), "neither text nor texts"),
    ({"texts": ["x"]}, ("text",), "both text and texts"),
    ({"text": None, "texts": None}, ("text",), "both text and texts"),
    ({"text": None}, ("text",), "must be a string"),
    ({"text": 3}, ("text",), "must be a string"),
    ({"text": True}, ("text",), "must be a string"),
    ({"text": ["x"]}, ("text",), "must be a string"),
    ({"text": {"a": "x"}}, ("text",), "must be a string"),
    ({"text": ""}, ("text",), "empty"),
    ({"text": " \n\t\u00a0\u3000"}, ("text",), "empty or only white space"),
    ({"text": "a\x00b"}, ("text",), "NUL character at position 1"),
    ({"text": "ab\ud800"}, ("text",), r"lone surrogate U\+D800 at position 2"),
    ({"text": "x" * 21}, ("text",), "has 21 characters, at most 20 allowed; shorten"),
    ({"text": ..., "texts": "x"}, ("texts",), "must be a list of strings, not a string; for one text use the key text"),
    ({"text": ..., "texts": {}}, ("texts",), "must be a list of strings, not an object"),
    ({"text": ..., "texts": None}, ("texts",), "must be a list of strings, not null"),
    ({"text": ..., "texts": []}, ("texts",), "empty list; send at least one"),
    (
        {"text": ..., "texts": ["x"] * 4},
        ("texts",),
        r"4 texts given, at most 3 allowed \(limits.max_texts\); send them",
    ),
    ({"text": ..., "texts": ["x", 1, ""]}, ("texts", 1), "must be a string"),
    ({"text": ..., "texts": ["x", "y", ""]}, ("texts", 2), "empty"),
    ({"text": ..., "texts": ["x", "\udfff"]}, ("texts", 1), "lone surrogate"),
    ({"labels": ...}, ("labels",), "is missing"),
    ({"labels": None}, ("labels",), "must be a list of labels, not one"),
    ({"labels": "a, b"}, ("labels",), "must be a list of labels, not one"),
    ({"labels": {"a": "b"}}, ("labels",), "must be a list of labels, not one"),
    ({"labels": 7}, ("labels",), "must be a list of labels"),
    ({"labels": []}, ("labels",), "0 labels given, at least 2 needed"),
    ({"labels": ["a"]}, ("labels",), "1 label given, at least 2 needed"),
    ({"labels": [], "return_logits": True}, ("labels",), "0 labels given, at least 1 needed"),
    ({"labels": list("abcde")}, ("labels",), "5 labels given, at most 4 allowed"),
    ({"labels": ["a", 3]}, ("labels", 1), "must be a string or an object with name and description"),
    ({"labels": ["a", None]}, ("labels", 1), "must be a string or an object"),
    ({"labels": ["a", ["b"]]}, ("labels", 1), "must be a string or an object"),
    ({"labels": ["a", " "]}, ("labels", 1), "empty"),
    ({"labels": ["a\x00", "b"]}, ("labels", 0), "NUL"),
    ({"labels": ["a", "\udc00"]}, ("labels", 1), "lone surrogate"),
    ({"labels": ["a", "x" * 21]}, ("labels", 1), "has 21 characters, at most 20"),
    ({"labels": ["a", "b", "a"]}, ("labels", 2), "same label as number 0"),
    ({"labels": ["a", " a "]}, ("labels", 1), "same label as number 0"),
    ({"labels": ["caf\u00e9", "b", "cafe\u0301"]}, ("labels", 2), "same label as number 0"),
    ({"labels": ["a", {"name": "b", "description": "a"}]}, ("labels", 1), "given twice"),
    ({"labels": ["a", {"name": "b", "description": ["c", "c"]}]}, ("labels", 1), "given twice"),
    ({"labels": ["a", {}]}, ("labels", 1), "has no name"),
    ({"labels": ["a", {"description": "b"}]}, ("labels", 1), "has no name"),
    ({"labels": ["a", {"name": "b", "descripton": "c"}]}, ("labels", 1), r"unknown keys \['descripton'\]"),
    ({"labels": ["a", {"name": "b", "k" * 10_000: "c"}]}, ("labels", 1), "unknown keys .{1,60}; a label has"),
    ({"labels": ["a", {"name": 3}]}, ("labels", 1, "name"), "must be a string"),
    ({"labels": ["a", {"name": "b", "description": None}]}, ("labels", 1, "description"), "string or a list"),
    ({"labels": ["a", {"name": "b", "description": []}]}, ("labels", 1, "description"), "empty list"),
    ({"labels": ["a", {"name": "b", "description": ["c", 3]}]}, ("labels", 1, "description", 1), "must be a string"),
    ({"labels": ["a", {"name": "b", "description": [" "]}]}, ("labels", 1, "description"), "empty"),
    ({"explain": "yes"}, ("explain",), "must be true, false or \"all\".* 'yes'"),
    ({"explain": "ALL"}, ("explain",), "must be"),
    ({"explain": 1}, ("explain",), "must be"),
    ({"explain": None}, ("explain",), "must be"),
    ({"explain": []}, ("explain",), "must be"),
    ({"return_logits": "true"}, ("return_logits",), "must be true or false"),
    ({"return_logits": 1}, ("return_logits",), "must be true or false"),
    ({"return_logits": None}, ("return_logits",), "must be true or false"),
    ({"top_k": 0}, ("top_k",), "at least 1.* it is 0"),
    ({"top_k": -1}, ("top_k",), "at least 1"),
    ({"top_k": True}, ("top_k",), "at least 1"),
    ({"top_k": 1.5}, ("top_k",), "at least 1.* it is 1.5"),
    ({"top_k": 2.0}, ("top_k",), "at least 1"),
    ({"top_k": "3"}, ("top_k",), "at least 1"),
    ({"top_k": []}, ("top_k",), "at least 1"),
    ({"label_set": "0" * 32}, ("label_set",), "both labels and label_set are given; send one of them"),
    ({"labels": ..., "label_set": "0" * 31}, ("label_set",), "is no id of a label set, which has 32 hex digits; it is"),
    ({"labels": ..., "label_set": "0" * 31 + "\n"}, ("label_set",), "is no id"),
    ({"labels": ..., "label_set": "A" * 32}, ("label_set",), "is no id"),
    ({"labels": ..., "label_set": ["0" * 32]}, ("label_set",), "is no id"),
    ({"labels": ..., "label_set": None}, ("label_set",), "is no id.*Send the one that POST /v1/label-sets gave"),
    ({"more": "x"}, ("more",), "is not a key of this request; it takes text, texts, labels, label_set"),
    ({"Text": "x"}, ("Text",), "is not a key"),
    ({"": "x"}, ("",), "is not a key"),
    ({"lone \ud800": "x"}, ("lone \\ud800",), "is not a key"),
]


@pytest.mark.parametrize(("changes", "loc", "words"), BAD, ids=[json.dumps(row[0], default=str)[:60] for row in BAD])
def test_bad_requests_are_named(changes: dict[str, Any], loc: tuple[str | int, ...], words: str) -> None:
    """The place within the request, what is wrong with the value there, and what it should be."""
    with pytest.raises(InputError, match=words) as caught:
        parse(**changes)
    assert caught.value.loc == loc


@pytest.mark.parametrize("key", [*ClassifyRequest.model_fields, "k" * 10_000])
@pytest.mark.parametrize("value", ["9" * 100_000, ["x"] * 100_000, {"k" * 100_000: 1}, 10**4_000, [["\ud800"]]])
def test_an_error_never_sends_a_large_value_back(key: str, value: Any) -> None:
    """However large a wrong value is, the error about it is short, and can be encoded."""
    changes: dict[str, Any] = {key: value, "text": ...} if key == "texts" else {key: value}
    if key == "top_k" and isinstance(value, int):
        assert parse(**changes).top_k == value
        return
    with pytest.raises(InputError) as caught:
        parse(**changes)
    body = json.dumps(to_http(caught.value).body(), ensure_ascii=False).encode("utf-8")
    assert len(body) < 1_000


@pytest.mark.parametrize("key", [*ClassifyRequest.model_fields, "other"])
@pytest.mark.parametrize("depth", [1, 100, 900])
def test_a_deep_value_is_refused_like_a_flat_one(key: str, depth: int) -> None:
    """Lists within lists are of the wrong type, at any depth that the JSON parser lets through."""
    value = json.loads("[" * depth + "]" * depth)
    changes: dict[str, Any] = {key: value, "text": ...} if key == "texts" else {key: value}
    with pytest.raises(InputError):
        parse(**changes)
