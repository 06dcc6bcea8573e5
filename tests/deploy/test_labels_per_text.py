"""Other labels for each text of a request, and labels of which nothing stays."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.http.schemas import ClassifyQuery, parse_classify
from deploy.label_cache import MemoryStore
from deploy.settings import LimitSettings
from deploy.wire import Priority
from tokenalign import LabelSet
from tokenalign.client.answers import classification
from tokenalign.errors import InputError

Stack = Any
RunStack = Callable[..., Any]

TEXTS = ["card twice", "cash", "not received, e\u0301 \U0001f600", "card twice"]
SETS: list[Any] = [
    ["card", "cash"],
    ["not received", "card", {"name": "n", "description": ["cash", "twice"]}],
    ["a", "b", "card " * 300],
    ["card", "cash"],
]


class TestPerText:
    async def test_answers_are_the_librarys(self, any_stack: Stack, any_pair: Any) -> None:
        """Each text has the scores, names, matches and warnings that the library gives it with its own labels."""
        answer = await any_stack.ask(texts=TEXTS, labels=SETS, explain="all", return_logits=True, top_k=2)
        expected = any_pair.classifier(TEXTS, SETS, explain="all", return_logits=True, top_k=2)
        for i, (result, reference) in enumerate(zip(answer["results"], expected, strict=True)):
            found = classification(result, [w for w in answer["warnings"] if w["loc"][:2] == ["labels", i]])
            assert list(found["scores"]) == list(reference["scores"])
            assert found["scores"] == pytest.approx(reference["scores"], abs=1e-3)
            assert found["logits"] == pytest.approx(reference["logits"], abs=2e-2)
            words = [[(m["label"], m["description"], m["span"]) for m in r["matches"]] for r in (found, reference)]
            assert words[0] == words[1]
            assert found["warnings"] == reference["warnings"]
        assert [w["loc"] for w in answer["warnings"]] == [["labels", 2, 2]]

    async def test_one_text_and_its_list(self, stack: Stack, bert: Any) -> None:
        """A single text takes one list within a list, as the library does."""
        answer = await stack.ask(text="card", labels=[["card", "card " * 300]])
        assert answer["warnings"] == bert.classifier("card", [["card", "card " * 300]])["warnings"]
        assert answer["warnings"][0]["loc"] == ["labels", 0, 1]

    async def test_usage_counts_distinct_lists(self, stack: Stack) -> None:
        """Equal lists are one, in the batch and in what is counted; descriptions of different lists add up."""
        first = await stack.ask(texts=TEXTS, labels=SETS)
        [batch] = stack.sent
        assert len(batch.label_sets) == 3
        assert first["usage"]["labels"] == 2 + 4 + 3
        assert first["usage"]["labels_cached"] < 9
        again = await stack.ask(texts=TEXTS, labels=SETS)
        assert again["usage"]["labels_cached"] == 9
        assert again["results"] == first["results"]

    @pytest.mark.parametrize(
        ("body", "loc", "words"),
        [
            ({"texts": ["a", "b"], "labels": [["a", "b"]]}, ["labels"], "1 lists of labels given for 2 texts; give"),
            ({"text": "a", "labels": [["a", "b"], ["c", "d"]]}, ["labels"], "2 lists of labels given for 1 text; give"),
            ({"texts": ["a", "b"], "labels": [["a", "b"], ["c"]]}, ["labels", 1], "1 label given, at least 2 needed"),
            ({"texts": ["a", "b"], "labels": [["a", "b"], []]}, ["labels", 1], "0 labels given"),
            ({"texts": ["a", "b"], "labels": [["a", "b"], ["c", ""]]}, ["labels", 1, 1], "empty"),
            ({"texts": ["a", "b"], "labels": [["a", "b"], ["c", "c"]]}, ["labels", 1, 1], "same label as number 0"),
            ({"texts": ["a", "b"], "labels": [["a", "b"], "c"]}, ["labels", 0], "must be a string or an object"),
            ({"texts": ["a", "b"], "labels": [["a", "b"], [["c"], "d"]]}, ["labels", 1, 0], "must be a string or"),
            ({"texts": ["a", "b"], "labels": [["a", "b"], ["c", "\u200b"]]}, ["labels", 1, 1], "no character that"),
            (
                {"texts": ["a", "b"], "labels": [["a", {"name": "b", "description": ["c", "\u200b"]}], ["a", "b"]]},
                ["labels", 0, 1, "description", 1],
                "no character that",
            ),
            ({"texts": ["a", "b"], "labels": [["a", "b"], ["c", "\ud800"]]}, ["labels", 1, 1], "lone surrogate"),
            (
                {"texts": ["a", "b"], "labels": [["a", "b"], ["c"]], "return_logits": True, "min_margin": 0.5},
                ["min_margin"],
                "second best",
            ),
        ],
    )
    async def test_bad_lists_are_named(self, stack: Stack, body: dict[str, Any], loc: list[Any], words: str) -> None:
        """422 at the text's own list, or at all of them where their number is wrong."""
        response = await stack.client.post("/v1/classify", content=json.dumps(body))
        assert (response.status_code, response.json()["loc"]) == (422, loc), response.text
        assert words in response.json()["error"]

    def test_the_limit_is_of_each_list(self) -> None:
        """Each list may have as many labels as a request's one list."""
        limits = LimitSettings(max_labels=2)
        lists = [["a", "b"], ["c", "d"]]
        body = {"texts": ["a", "b"], "labels": lists}
        assert len(parse_classify(body, limits).text_labels) == 2
        lists[1].append("e")
        with pytest.raises(InputError, match="3 labels given, at most 2 allowed") as caught:
            parse_classify(body, limits)
        assert caught.value.loc == ("labels", 1)


class RecordingStore(MemoryStore):
    """A label store that shows every key that it was asked about, or given."""

    def __init__(self) -> None:
        super().__init__(2**24)
        self.keys: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.endswith("_many"):
            return found

        def record(keys: Any, *rest: Any, **more: Any) -> Any:
            self.keys.extend([keys] if isinstance(keys, str) else keys)
            return found(keys, *rest, **more)

        return record


class TestNothingKept:
    async def test_rows_are_neither_read_nor_written(self, run_stack: RunStack, bert: Any) -> None:
        """Labels that aren't to be kept never reach the store or the lists in memory, and score the same."""
        store = RecordingStore()
        labels = LabelSet.of(["where is my card", {"name": "x", "description": ["cash", "twice"]}])
        query = ClassifyQuery(("card twice", "cash"), False, labels, "all", True, None, keep_labels=False)
        async with run_stack(bert, store=store) as stack:
            await stack.drain()
            held = len(stack.scorer._memory)
            store.keys.clear()
            passing = [await stack.ingress.classify(query) for _ in range(2)]
            await stack.drain()
            assert store.keys == []
            assert len(stack.scorer._memory) == held
            assert [answer["usage"]["labels_cached"] for answer in passing] == [0, 0]
            assert len([batch for batch in stack.encoded if batch.priority is Priority.LABELS]) == 2
            kept = await stack.ingress.classify(replace(query, keep_labels=True))
            await stack.drain()
            assert store.keys
            assert kept["results"] == passing[0]["results"] == passing[1]["results"]
            store.keys.clear()
            again = await stack.ingress.classify(query)
            assert store.keys == []
            assert again["usage"]["labels_cached"] == 0

    async def test_one_label_is_enough_and_bad_ones_are_named(self, stack: Stack) -> None:
        """A query of a reranking is one label; one that can't be read is refused at its place."""
        query = ClassifyQuery(
            ("card",), True, LabelSet.of(["cash"], min_labels=1), False, True, None, keep_labels=False
        )
        [result] = (await stack.ingress.classify(query))["results"]
        assert "logit" in result["scores"][0]
        with pytest.raises(InputError, match="no character") as caught:
            await stack.ingress.classify(replace(query, labels=LabelSet.of(["\u200b"], min_labels=1)))
        assert caught.value.loc == ("labels", 0)

    def test_it_is_no_key_of_a_request(self) -> None:
        """Callers can't ask for it."""
        with pytest.raises(InputError, match="is not a key"):
            parse_classify({"text": "a", "labels": ["a", "b"], "keep_labels": False}, LimitSettings())
