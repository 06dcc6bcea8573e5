"""Several heads on one encoder: each answers as the library does with it alone, and no row of one is another's."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.label_cache import MemoryStore
from deploy.model import served_models
from deploy.settings import ModelSettings, Settings
from deploy.wire import Priority, ReplicaLostError
from tokenalign.client.answers import classification
from tokenalign.errors import ConfigError, NumericalError

Stack = Any
RunStack = Callable[..., Any]

TEXTS = ["I was charged twice for the same card payment.", "cash not received " * 20, "card"]
LABELS: list[Any] = ["duplicate card payment", {"name": "cash", "description": ["no cash", "cash"]}, "declined"]
DESCRIPTIONS = 4


@pytest.fixture(scope="session")
def second(load_pair: Any, make_head: Any, bert_backbone: Path) -> Any:
    """Another head on the tiny BERT: other weights, widths, templates, length and calibration."""
    folder = make_head(
        bert_backbone,
        seed=9,
        name="trained-last",
        width=16,
        max_length=40,
        label_template="about {label}",
        temperature=0.5,
        multi_label={"scale": 0.7, "bias": -1.5},
    )
    return load_pair(folder)


@pytest.fixture(scope="session")
def pairs(bert: Any, second: Any) -> dict[str | None, Any]:
    """The heads by the names that requests give; None is the default."""
    return {None: bert, "second": second}


@pytest.fixture(params=[True, False], ids=["projected rows", "token states"])
async def heads(request: pytest.FixtureRequest, run_stack: RunStack, bert: Any, second: Any) -> AsyncIterator[Stack]:
    """A running application with both heads."""
    models = {bert.served.config.name: bert.served, "second": second.served}
    async with run_stack(models, model={"device": "cpu", "project_on_encoder": request.param}) as running:
        yield running


def assert_answers(answer: dict[str, Any], expected: list[Any]) -> None:
    for result, reference in zip(answer["results"], expected, strict=True):
        found = classification(result, answer["warnings"])
        assert found.keys() == reference.keys()
        assert (found["label"], found["truncation"]) == (reference["label"], reference["truncation"])
        assert found["scores"] == pytest.approx(reference["scores"], abs=2e-3)
        assert found["logits"] == pytest.approx(reference["logits"], abs=3e-2)
        assert found["warnings"] == reference["warnings"]
        words = [[(m["label"], m["description"], m["span"]) for m in r["matches"]] for r in (found, reference)]
        assert words[0] == words[1]


@pytest.mark.parametrize("name", [None, "second"])
@pytest.mark.parametrize(
    "options", [{}, {"label_template": "{label} it is"}, {"long_text": "window", "window_stride": 20}], ids=str
)
async def test_answers_are_the_librarys(
    heads: Stack, pairs: dict[str | None, Any], name: str | None, options: dict[str, Any]
) -> None:
    """With its name in the request, each head gives what the library gives with it; without one the default does."""
    options = {**options, "explain": "all", "return_logits": True}
    answer = await heads.ask(texts=TEXTS, labels=LABELS, model=name, **options)
    classifier = pairs[name].classifier
    assert_answers(answer, classifier(TEXTS, LABELS, **options))
    served = classifier.config.name if name is None else name
    assert answer["model"] == {"name": served, "fingerprint": classifier.fingerprint}


async def test_interleaved_in_one_batch(heads: Stack, pairs: dict[str | None, Any], until: Any) -> None:
    """Requests for both heads that wait together leave together, each to its own head, and each is answered by it."""
    names = [None, "second", None, "second"]
    options = {"labels": LABELS, "explain": True, "return_logits": True}
    slots, heads.slots = heads.slots, 0
    asked = [asyncio.create_task(heads.ask(texts=TEXTS, model=name, **options)) for name in names]
    await until(lambda: heads.waiting_texts == len(TEXTS) * len(names))
    heads.slots = slots
    for name, answer in zip(names, await asyncio.gather(*asked), strict=True):
        assert_answers(answer, pairs[name].classifier(TEXTS, LABELS, explain=True, return_logits=True))
    # The library's own lengths: what one head cuts at 40 tokens, the other reads on.
    for batch in heads.sent:
        assert {question.labels for question in batch.questions} == {0}
    assert {batch.fingerprint for batch in heads.sent} == {pair.classifier.fingerprint for pair in pairs.values()}


async def test_cached_rows_never_mix(run_stack: RunStack, pairs: dict[str | None, Any]) -> None:
    """Each head has the labels encoded for itself, once, and finds its own rows again, on other scorers too."""
    models = {pairs[None].served.config.name: pairs[None].served, "second": pairs["second"].served}
    store = MemoryStore(2**24)
    first: dict[str | None, Any] = {}
    async with run_stack(models, store=store) as stack:
        for cached in (0, DESCRIPTIONS):
            for name in pairs:
                answer = await stack.ask(texts=TEXTS, labels=LABELS, model=name, return_logits=True)
                assert answer["usage"]["labels_cached"] == cached
                assert first.setdefault(name, answer["results"]) == answer["results"]
        await stack.drain()
    async with run_stack(models, store=store) as stack:
        for name in pairs:
            answer = await stack.ask(texts=TEXTS, labels=LABELS, model=name, return_logits=True)
            assert (answer["usage"]["labels_cached"], answer["results"]) == (DESCRIPTIONS, first[name])
        assert not [batch for batch in stack.encoded if batch.priority is Priority.LABELS]


async def test_options_are_the_heads(heads: Stack) -> None:
    """What a head lacks, and how long its windows are, is that head's own."""
    assert (await heads.post(text="card", labels=["a"], model="second", multi_label=True)).status_code == 200
    refused = await heads.post(text="card", labels=["a"], multi_label=True)
    assert (refused.status_code, refused.json()["loc"]) == (422, ["multi_label"])
    refused = await heads.post(text="card", labels=LABELS, min_score="calibrated")
    assert (refused.status_code, refused.json()["loc"]) == (422, ["min_score"])
    for name, status in (("second", 422), (None, 200)):
        response = await heads.post(text="card", labels=LABELS, model=name, long_text="window", window_stride=90)
        assert response.status_code == status


async def test_warnings_are_the_heads(heads: Stack, pairs: dict[str | None, Any]) -> None:
    """A label that one head cuts and the other reads whole is warned of by the one that cuts it, whoever is first."""
    labels = ["card", "cash " * 60]
    for name, cut in ((None, 0), ("second", 1), (None, 0)):
        answer = await heads.ask(text="card", labels=labels, model=name)
        assert len(answer["warnings"]) == cut
        assert answer["warnings"] == pairs[name].classifier("card", labels)["warnings"]


async def test_the_list(heads: Stack, pairs: dict[str | None, Any]) -> None:
    """GET /v1/models names all heads with their fingerprints, the default first; /v1/model is the default."""
    listed = (await heads.client.get("/v1/models")).json()
    assert listed == {
        "models": [
            {
                "name": pairs[None].classifier.config.name,
                "fingerprint": pairs[None].classifier.fingerprint,
                "default": True,
            },
            {"name": "second", "fingerprint": pairs["second"].classifier.fingerprint, "default": False},
        ]
    }
    assert (await heads.client.get("/v1/model")).json()["fingerprint"] == pairs[None].classifier.fingerprint
    by_name = await heads.ask(text="card", labels=LABELS, model=pairs[None].classifier.config.name)
    assert by_name["model"]["fingerprint"] == pairs[None].classifier.fingerprint


@pytest.mark.parametrize(
    ("name", "status", "error_type"),
    [
        ("third", 404, "unknown_model"),
        ("x" * 200, 404, "unknown_model"),
        ("trained-last", 404, "unknown_model"),
        ("", 422, "invalid_input"),
        (3, 422, "invalid_input"),
        (["second"], 422, "invalid_input"),
        ("x" * 201, 422, "invalid_input"),
        ("\ud800", 422, "invalid_input"),
    ],
)
@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_name_that_none_has(heads: Stack, name: Any, status: int, error_type: str, accept: str) -> None:
    """404 at the key, with the names that there are; what can't be a name is a 422."""
    body = json.dumps({"text": "card", "labels": LABELS, "model": name})
    response = await heads.client.post("/v1/classify", content=body, headers={"accept": accept})
    error = response.json()
    assert (response.status_code, error["error_type"], error["loc"]) == (status, error_type, ["model"])
    if status == 404:
        assert "there is tiny-bert" in error["error"]
        assert ", second" in error["error"]
    assert len(error["error"]) < 500


async def test_streams_name_their_head(heads: Stack, second: Any) -> None:
    """A stream is answered by the head that it asks for."""
    body = {"texts": TEXTS, "labels": LABELS, "model": "second"}
    response = await heads.client.post("/v1/classify", json=body, headers={"accept": "application/x-ndjson"})
    *_, summary = (json.loads(line) for line in response.text.splitlines())
    assert summary["model"] == {"name": "second", "fingerprint": second.classifier.fingerprint}


async def test_label_sets_are_for_all_heads(heads: Stack) -> None:
    """A kept list is encoded for every head before the answer, and its id serves with each."""
    kept = (await heads.client.post("/v1/label-sets", json={"labels": LABELS})).json()
    assert kept["labels_cached"] == 0
    for name in (None, "second"):
        answer = await heads.ask(text="card", label_set=kept["id"], model=name)
        assert answer["usage"]["labels_cached"] == DESCRIPTIONS


async def test_what_fails_for_one_head(heads: Stack, second: Any, until: Any) -> None:
    """An error of one head's part of a batch is that part's alone; a lost replica is tried again for it alone."""
    send, failures = heads.ingress._send, [ReplicaLostError("gone"), NumericalError("NaN")]

    async def fail(batch: Any) -> Any:
        if batch.fingerprint == second.classifier.fingerprint and failures:
            raise failures.pop(0)
        return await send(batch)

    heads.ingress._send = fail
    slots, heads.slots = heads.slots, 0
    asked = [asyncio.create_task(heads.post(text="card", labels=LABELS, model=name)) for name in (None, "second")]
    await until(lambda: heads.waiting_texts == 2)
    heads.slots = slots
    assert [response.status_code for response in await asyncio.gather(*asked)] == [200, 500]
    assert failures == []
    assert len(heads.sent) == 1


class TestSettings:
    def test_heads_of_the_settings(self, bert_head: Path, make_head: Any, bert_backbone: Path) -> None:
        """The default head is first, the others have the names that they were given; the encoder may be overridden."""
        other = make_head(bert_backbone, seed=4, name="its-own-name")
        settings = ModelSettings.model_validate(
            {
                "id_or_path": str(bert_head),
                "device": "cpu",
                "backbone": str(bert_backbone),
                "heads": {"team/other": {"id_or_path": str(other)}},
            }
        )
        models = served_models(settings)
        assert list(models) == [f"tiny-{bert_backbone.name}", "team/other"]
        assert models["team/other"].config.name == "its-own-name"
        assert models["team/other"].head_digest != next(iter(models.values())).head_digest

    @pytest.mark.data
    def test_another_encoder(self, bert_head: Path, qwen3_head: Path) -> None:
        """A head on another encoder is refused with both encoders' names and a remedy."""
        settings = ModelSettings.model_validate(
            {"id_or_path": str(bert_head), "heads": {"other": {"id_or_path": str(qwen3_head)}}}
        )
        with pytest.raises(ConfigError, match=r"model\.heads\.other: is on the encoder .*qwen3.*; heads of one"):
            served_models(settings)

    def test_the_same_files_elsewhere(
        self, bert_head: Path, bert_backbone: Path, make_head: Any, tmp_path: Path
    ) -> None:
        """An encoder is the same when its weights are, wherever they lie; other weights of the same shape are not."""
        import shutil

        import torch
        from transformers import BertConfig, BertModel

        copy = tmp_path / "copy"
        shutil.copytree(bert_backbone, copy)
        heads = {"copied": {"id_or_path": str(make_head(copy))}}
        settings = {"id_or_path": str(bert_head), "device": "cpu", "heads": heads}
        assert len(served_models(ModelSettings.model_validate(settings))) == 2
        torch.manual_seed(77)
        BertModel(BertConfig.from_pretrained(copy), add_pooling_layer=False).save_pretrained(copy)
        heads["changed"] = {"id_or_path": str(make_head(copy))}
        del heads["copied"]
        with pytest.raises(ConfigError, match=r"model\.heads\.changed: is on the encoder"):
            served_models(ModelSettings.model_validate(settings))

    def test_the_name_of_the_default(self, bert_head: Path, bert_backbone: Path) -> None:
        """Two heads of one name can't be told apart."""
        name = f"tiny-{bert_backbone.name}"
        settings = {"id_or_path": str(bert_head), "device": "cpu", "heads": {name: {"id_or_path": str(bert_head)}}}
        with pytest.raises(ConfigError, match="is the name of the default head too; choose another"):
            served_models(ModelSettings.model_validate(settings))

    @pytest.mark.parametrize(
        ("heads", "words"),
        [
            ({"a b": {"id_or_path": "x"}}, "model.heads.a b"),
            ({"": {"id_or_path": "x"}}, "model.heads"),
            ({"a": {}}, "model.heads.a.id_or_path"),
            ({"a": {"id_or_path": "x", "device": "cpu"}}, "model.heads.a.device: unknown key"),
            (["a"], "model.heads"),
        ],
    )
    def test_mistakes_are_named(self, heads: Any, words: str) -> None:
        """Names are words without spaces; a head has its own files, and no device of its own."""
        with pytest.raises(ConfigError, match=words):
            Settings.parse({"model": {"heads": heads}})
