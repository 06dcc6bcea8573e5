"""Everything that can be asked of a call: the service answers as the library does, whatever is asked together."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest

from deploy.http.schemas import ClassifyResponse, ResultSchema
from deploy.wire import Priority
from tokenalign.client.answers import classification

Stack = Any  # the fixtures' class; tests are no package that could be imported from
RunStack = Callable[..., Any]

SHORT = "I was charged twice for the same card payment."
LONG = "the card was charged twice, then " + "we waited for the cash and called support again " * 40 + "declined"
TEXTS = [SHORT, LONG, "cash", "Pourquoi ma carte ?  日本 👍🏽 <think> [SEP] " * 30, SHORT]
LABELS: list[Any] = [
    "duplicate card payment",
    {"name": "cash", "description": ["cash withdrawal not received", "no cash, though charged"]},
    {"name": "declined", "description": "card declined"},
    "card, not received",
]
DESCRIPTIONS = 5
TEMPLATE = "the text is about {label}!"
OPTIONS: dict[str, dict[str, Any]] = {
    "multi_label": {"multi_label": True},
    "multi_label, best two": {"multi_label": True, "top_k": 2, "return_logits": True, "explain": "all"},
    "multi_label, one label": {"multi_label": True, "labels": ["card"], "min_score": 0.5},
    "min_score never reached": {"min_score": 1.0, "explain": True},
    "min_score always reached": {"min_score": 0.0},
    "min_margin": {"min_margin": 0.9, "top_k": 1, "return_logits": True},
    "both": {"min_score": 0.2, "min_margin": 0.1, "multi_label": True},
    "template": {"label_template": TEMPLATE, "explain": "all", "return_logits": True},
    "the model's template": {"label_template": "{label}"},
    "windows": {"long_text": "window"},
    "windows, explained": {"long_text": "window", "explain": "all", "return_logits": True},
    "windows, small steps": {"long_text": "window", "window_stride": 40, "explain": True, "top_k": 2},
    "all of it": {
        "long_text": "window",
        "window_stride": 100,
        "explain": "all",
        "return_logits": True,
        "multi_label": True,
        "min_margin": 0.3,
        "label_template": TEMPLATE,
        "top_k": 3,
    },
}


def assert_same(found: Any, expected: Any, at: str = "") -> None:
    """The same keys, words and places; numbers differ by no more than fp16 rows make them."""
    if isinstance(expected, Mapping):
        assert list(found) == list(expected) or found.keys() == expected.keys(), at
        for key in expected:
            assert_same(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{at}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-2 if ".logits" in at else 3e-3), at
    else:
        assert found == expected, at


def as_library(answer: dict[str, Any]) -> list[Any]:
    """The results of an answer in the library's form, without the warnings that all share."""
    return [classification(result, []) for result in answer["results"]]


def without_warnings(results: list[Any]) -> list[Any]:
    return [{**result, "warnings": []} for result in results]


@pytest.fixture(scope="session")
def calibrated(load_pair: Any, make_head: Any, bert_backbone: Path) -> Any:
    """A random head on the tiny BERT that has a calibration for independent scores."""
    abstention = {"kept": 0.95, "labels": 4, "min_score": 0.99, "multi_label_min_score": 0.01}
    return load_pair(make_head(bert_backbone, multi_label={"scale": 0.7, "bias": -1.5}, abstention=abstention))


@pytest.fixture(params=["calibrated", "minilm"])
async def pair(request: pytest.FixtureRequest) -> Any:
    """Heads that have such a calibration: a quick one, and the shipped one."""
    return request.getfixturevalue(request.param)


@pytest.fixture
async def served(pair: Any, run_stack: RunStack) -> AsyncIterator[Stack]:
    """A running application on `pair`."""
    async with run_stack(pair) as running:
        yield running


@pytest.mark.parametrize("name", OPTIONS)
async def test_answers_are_the_librarys(served: Stack, pair: Any, name: str) -> None:
    """Each option, and all of them, give for each text the library's keys, numbers, words and places."""
    options = {"labels": LABELS, **OPTIONS[name]}
    answer = await served.ask(texts=TEXTS, **options)
    expected = pair.classifier(TEXTS, options.pop("labels"), **options)
    assert_same(as_library(answer), without_warnings(expected))
    assert answer["warnings"] == expected[0]["warnings"]
    documented = ClassifyResponse.model_validate(answer)
    assert all(result.keys() <= ResultSchema.model_fields.keys() for result in answer["results"])
    assert [result.label for result in documented.results] == [result["label"] for result in expected]


@pytest.mark.parametrize(("multi_label", "limit"), [(False, 0.99), (True, 0.01)])
async def test_the_models_own_limit(calibrated: Any, run_stack: RunStack, multi_label: bool, limit: float) -> None:
    """`calibrated` asks for the limit in the head's configuration, which independent scores have another of."""
    options: dict[str, Any] = {"multi_label": multi_label, "top_k": 1}
    async with run_stack(calibrated) as served:
        own = await served.ask(texts=TEXTS, labels=LABELS, min_score="calibrated", **options)
        stated = await served.ask(texts=TEXTS, labels=LABELS, min_score=limit, **options)
    assert own["results"] == stated["results"]
    assert {result["label"] is None for result in own["results"]} == {not multi_label}


async def test_neighbours_in_a_batch_ask_differently(served: Stack, pair: Any, until: Any) -> None:
    """Requests that travel in one batch with other options of each kind have the answers that they have alone."""
    bodies = [
        {"labels": LABELS, "texts": random.Random(i).sample(TEXTS, 2), **o} for i, o in enumerate(OPTIONS.values())
    ]
    slots, served.slots = served.slots, 0
    requests = [served.client.build_request("POST", "/v1/classify", json=body) for body in bodies]
    waiting = [asyncio.create_task(served.client.send(request)) for request in requests]
    await until(lambda: served.waiting_texts == 2 * len(bodies))
    served.slots = slots
    for body, response in zip(bodies, await asyncio.gather(*waiting), strict=True):
        options = {key: value for key, value in body.items() if key not in ("labels", "texts")}
        expected = pair.classifier(body["texts"], body["labels"], **options)
        assert_same(as_library(response.json()), without_warnings(expected))


def refused(response: httpx.Response, loc: list[Any], words: str) -> None:
    """A 422 at that place with these words and a remedy."""
    error = response.json()
    assert (response.status_code, error["error_type"], error["loc"]) == (422, "invalid_input", loc), response.text
    assert words in error["error"]
    assert ";" in error["error"] or "must" in error["error"]


class TestMultiLabel:
    async def test_without_a_calibration(self, stack: Stack) -> None:
        """A model that was never calibrated for it refuses, and says how to calibrate one; nothing is encoded."""
        response = await stack.post(text="card", labels=LABELS, multi_label=True)
        refused(response, ["multi_label"], "has no calibration for independent scores; fit one with")
        assert stack.encoded == []

    async def test_one_label_of_a_set(self, run_stack: RunStack, calibrated: Any) -> None:
        """One kept label is enough for independent scores, as one that is sent along is."""
        async with run_stack(calibrated) as stack:
            kept = await stack.client.post("/v1/label-sets", json={"labels": ["card"]})
            by_id = await stack.ask(text="card", label_set=kept.json()["id"], multi_label=True)
            brought = await stack.ask(text="card", labels=["card"], multi_label=True)
            assert by_id["results"] == brought["results"]
            assert 0 < by_id["results"][0]["score"] < 1


class TestAbstention:
    async def test_no_label_but_its_scores(self, stack: Stack) -> None:
        """Where the limit isn't reached no label is named, the reason is, and everything else stays as it was."""
        plain = (await stack.ask(text=SHORT, labels=LABELS, explain=True))["results"][0]
        result = (await stack.ask(text=SHORT, labels=LABELS, explain=True, min_score=1))["results"][0]
        assert result.pop("abstained") == {"reason": "min_score", "value": plain["score"], "limit": 1.0}
        assert result == {**plain, "label": None}

    async def test_the_margin_looks_at_all_labels(self, stack: Stack) -> None:
        """The second best counts though `top_k` leaves it out of the answer."""
        both = (await stack.ask(text=SHORT, labels=LABELS))["results"][0]["scores"]
        result = (await stack.ask(text=SHORT, labels=LABELS, top_k=1, min_margin=1))["results"][0]
        assert result["abstained"]["value"] == pytest.approx(both[0]["score"] - both[1]["score"], abs=1e-6)
        assert len(result["scores"]) == 1


class TestTemplates:
    async def test_rows_of_templates_never_mix(self, run_stack: RunStack, bert: Any) -> None:
        """Each template has its rows encoded once, and another scorer finds just these in the store."""
        from deploy.label_cache import MemoryStore

        store = MemoryStore(2**24)
        body = {"text": SHORT, "labels": LABELS, "return_logits": True, "explain": "all"}
        bodies = [{**body, "label_template": template} for template in (None, TEMPLATE, "{label} it is", "{label}")]
        async with run_stack(bert, store=store) as stack:
            first = [await stack.ask(**b) for b in bodies]
            assert [answer["usage"]["labels_cached"] for answer in first] == [0, 0, 0, DESCRIPTIONS]
            assert first[3]["results"] == first[0]["results"]
            await stack.drain()
        async with run_stack(bert, store=store) as stack:
            again = [await stack.ask(**b) for b in bodies]
            assert [answer["usage"]["labels_cached"] for answer in again] == [DESCRIPTIONS] * 4
            assert not [batch for batch in stack.encoded if batch.priority is Priority.LABELS]
        assert [answer["results"] for answer in again] == [answer["results"] for answer in first]
        logits = [[score["logit"] for score in answer["results"][0]["scores"]] for answer in first[:3]]
        assert logits[0] != logits[1] != logits[2] != logits[0]

    async def test_a_batch_of_several_templates(self, stack: Stack, bert: Any) -> None:
        """The same labels in other templates are other label sets of a batch."""
        templates = [None, TEMPLATE, "{label} it is", TEMPLATE]
        bodies = [{"text": SHORT, "labels": LABELS, "label_template": template} for template in templates]
        responses = await stack.together(*bodies)
        assert len(stack.sent[-1].label_sets) == 3
        for template, response in zip(templates, responses, strict=True):
            expected = bert.classifier(SHORT, LABELS, label_template=template)
            assert_same(as_library(response.json()), without_warnings([expected]))

    async def test_warnings_are_of_the_template(self, stack: Stack, bert: Any) -> None:
        """A label that only a long template makes too long is cut, and a warning says so, for that template alone."""
        labels = ["card", "cash " * 60]
        for template, cut in (("{label} " + "card " * 80, 1), (None, 0)):
            answer = await stack.ask(text=SHORT, labels=labels, label_template=template)
            assert len(answer["warnings"]) == cut
            assert answer["warnings"] == bert.classifier(SHORT, labels, label_template=template)["warnings"]

    async def test_a_fingerprint_like_that_of_such_a_head(
        self, run_stack: RunStack, load_pair: Any, make_head: Any, bert: Any, bert_backbone: Path
    ) -> None:
        """Rows in a caller's template are those that the head would keep if the template were its own."""
        from deploy.label_cache import MemoryStore

        store = MemoryStore(2**24)
        own = load_pair(make_head(bert_backbone, label_template=TEMPLATE))
        async with run_stack(bert, store=store) as stack:
            asked = await stack.ask(text=SHORT, labels=LABELS, label_template=TEMPLATE, return_logits=True)
            await stack.drain()
        async with run_stack(own, store=store) as stack:
            kept = await stack.ask(text=SHORT, labels=LABELS, return_logits=True)
            assert kept["usage"]["labels_cached"] == DESCRIPTIONS
        assert kept["results"] == asked["results"]


class TestWindows:
    async def test_a_text_of_more_tokens_than_a_batch(self, run_stack: RunStack, bert: Any) -> None:
        """A text whose windows fill several batches goes alone and is answered like any other."""
        async with run_stack(bert, batching={"max_batch_tokens": 200}) as stack:
            answer = await stack.ask(texts=TEXTS, labels=LABELS, long_text="window", explain=True)
            assert max(len(batch.documents.ids) for batch in stack.sent) > 200
        expected = bert.classifier(TEXTS, LABELS, long_text="window", explain=True)
        assert_same(as_library(answer), without_warnings(expected))

    async def test_windows_share_a_batch_with_others(self, stack: Stack) -> None:
        """A document of several sequences, and whole ones, travel together; each question names its document."""
        long = "card payment " * 70
        cut = "cash not received " * 50
        responses = await stack.together(
            {"text": long, "labels": LABELS, "long_text": "window"},
            {"texts": [cut, long], "labels": LABELS},
            {"text": long, "labels": LABELS, "long_text": "window", "window_stride": 100},
        )
        [batch] = stack.sent
        assert sorted(batch.counts.tolist()) == [1, 1, 2, 2]
        assert int(batch.counts.sum()) == len(batch.documents.lengths)
        assert [response.status_code for response in responses] == [200] * 3

    async def test_a_text_of_one_window_is_encoded_once(self, stack: Stack) -> None:
        """However a short text is read, its tokens are the same and cross once."""
        await stack.together(
            {"text": SHORT, "labels": LABELS},
            {"text": SHORT, "labels": LABELS, "long_text": "window"},
            {"text": SHORT, "labels": LABELS, "long_text": "window", "window_stride": 3},
            {"text": SHORT, "labels": LABELS, "long_text": "error"},
        )
        assert len(stack.sent[-1].documents.lengths) == 1

    async def test_usage_counts_every_window(self, stack: Stack, bert: Any) -> None:
        """Tokens of a text are those that were read, the overlap twice."""
        answer = await stack.ask(text=LONG, labels=LABELS, long_text="window")
        windows = bert.served.tokenizer.windows([LONG])
        assert answer["usage"]["text_tokens"] == len(windows.tokenized.tokens.values)
        np.testing.assert_equal(answer["results"][0]["windows"]["count"], int(windows.counts[0]))

    async def test_too_many_windows(self, run_stack: RunStack, bert: Any) -> None:
        """Past `limits.max_windows` a text is refused at its place, with limit and remedy."""
        async with run_stack(bert, limits={"max_windows": 3}) as stack:
            response = await stack.post(texts=["card", LONG], labels=LABELS, long_text="window")
            refused(response, ["texts", 1], "windows, at most 3 allowed")
            response = await stack.post(text=LONG, labels=LABELS, long_text="window", window_stride=1)
            refused(response, ["text"], "raise window_stride, which is 1")

    async def test_refused_instead_of_cut(self, stack: Stack) -> None:
        """With "error" a text that would be cut is a 422 that says by how much; others are answered."""
        response = await stack.post(texts=["card", LONG], labels=LABELS, long_text="error")
        refused(response, ["texts", 1], "at most 128 are read (max_length); shorten or split it, or ask for")
        assert "windows" not in (await stack.ask(text=SHORT, labels=LABELS, long_text="error"))["results"][0]

    async def test_many_windows_are_tokenised_beside_the_loop(self, stack: Stack, bert: Any) -> None:
        """Texts of many characters together get the library's windows, though they are cut on a thread."""
        texts = [f"card payment {i} " + "declined " * 2_000 for i in range(2)]
        answer = await stack.ask(texts=texts, labels=LABELS, long_text="window", window_stride=120)
        expected = bert.classifier(texts, LABELS, long_text="window", window_stride=120)
        assert_same(as_library(answer), without_warnings(cast("list[Any]", expected)))


BAD: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "multi_label": ({"multi_label": 1}, ["multi_label"], "must be true or false"),
    "min_score too large": ({"min_score": 1.5}, ["min_score"], "a score lies from 0 to 1"),
    "min_score of another type": ({"min_score": "0.5"}, ["min_score"], "must be a number from 0 to 1"),
    "min_score true": ({"min_score": True}, ["min_score"], "must be a number from 0 to 1"),
    "min_margin negative": ({"min_margin": -0.1}, ["min_margin"], "a score lies from 0 to 1"),
    "min_margin of one label": (
        {"labels": ["a"], "return_logits": True, "min_margin": 0.1},
        ["min_margin"],
        "needs a second best score",
    ),
    "long_text": ({"long_text": "cut"}, ["long_text"], 'must be "truncate", "window" or "error"'),
    "long_text of another type": ({"long_text": []}, ["long_text"], 'must be "truncate"'),
    "long_text null": ({"long_text": None}, ["long_text"], 'must be "truncate"'),
    "stride without windows": ({"window_stride": 4}, ["window_stride"], 'only long_text "window" has a stride'),
    "stride 0": ({"long_text": "window", "window_stride": 0}, ["window_stride"], "it is 0"),
    "stride 1.5": ({"long_text": "window", "window_stride": 1.5}, ["window_stride"], "it is 1.5"),
    "stride true": ({"long_text": "window", "window_stride": True}, ["window_stride"], "it is True"),
    "stride with gaps": ({"long_text": "window", "window_stride": 127}, ["window_stride"], "from 1 to 126"),
    "a huge stride": ({"long_text": "window", "window_stride": 10**30}, ["window_stride"], "from 1 to 126"),
    "template without a label": ({"label_template": "about"}, ["label_template"], "{label} exactly once"),
    "template with two": ({"label_template": "{label}{label}"}, ["label_template"], "{label} exactly once"),
    "template of another type": ({"label_template": 3}, ["label_template"], "must be a string"),
    "empty template": ({"label_template": ""}, ["label_template"], "empty"),
    "template with a NUL": ({"label_template": "\x00{label}"}, ["label_template"], "NUL"),
    "template with a surrogate": ({"label_template": "\ud800{label}"}, ["label_template"], "lone surrogate"),
    "template with a control token": ({"label_template": "[SEP] {label}"}, ["label_template"], "control token"),
    "a template that leaves no room": ({"label_template": "card " * 200 + "{label}"}, ["label_template"], "max_length"),
    "a long template": ({"label_template": "x" * 10_000 + "{label}"}, ["label_template"], "at most 10,000"),
    "a label that a template can't save": (
        {"label_template": TEMPLATE, "labels": ["a", "\u200b"]},
        ["labels", 1],
        "no character that the tokenizer can read",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_options_are_refused(stack: Stack, name: str) -> None:
    """422 that names the key, its value or size, the limit and what to do."""
    body, loc, words = BAD[name]
    content = json.dumps({"text": "card", "labels": LABELS, **body})
    refused(await stack.client.post("/v1/classify", content=content), loc, words)
