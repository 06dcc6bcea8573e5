"""Label sets over HTTP: what is kept, what is told of it, and what a request with an id is spared."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from deploy.http.errors import to_http
from deploy.label_cache import MemoryStore, StoreError
from deploy.label_sets import Definition, LabelSetsUnavailableError, PinnedLabelSetError, UnknownLabelSetError
from deploy.wire import Priority, ReplicaLostError
from tokenalign import LabelSet
from tokenalign.backbone import Backbone
from tokenalign.errors import ConfigError, FingerprintMismatchError, NumericalError

Stack = Any
RunStack = Callable[..., Any]

MIB = 2**20
LABELS: list[Any] = ["card payment", {"name": "Bargeld", "description": ["cash", "naïve 日本"]}, "a, b"]
SET_ID = Definition.of(LabelSet.of(LABELS), None).set_id
FAR = {"near_duplicate_similarity": 1.0}  # the tiny models find everything alike


class BrokenStore(MemoryStore):
    """A store that fails while it is told to."""

    broken = False

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self._fail()
        return await super().get_many(keys)

    async def set_forever(self, key: str, value: bytes) -> None:
        self._fail()
        await super().set_forever(key, value)

    async def delete(self, key: str) -> bool:
        self._fail()
        return await super().delete(key)

    def _fail(self) -> None:
        if self.broken:
            raise StoreError("connect", "private words")


@pytest.fixture
async def stack(run_stack: RunStack, bert: Any) -> AsyncIterator[Stack]:
    """A running application whose labels are near-duplicates only when they are equal."""
    async with run_stack(bert, label_sets=FAR) as running:
        yield running


async def post(stack: Stack, labels: Any = LABELS, **more: Any) -> httpx.Response:
    response: httpx.Response = await stack.client.post("/v1/label-sets", json={"labels": labels, **more})
    return response


def refused(response: httpx.Response, status: int, error_type: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()
    assert error.keys() == {"error", "error_type", "loc", "request_id"}
    assert error["error_type"] == error_type
    assert "private" not in response.text
    return error


class TestPosting:
    async def test_a_new_set(self, stack: Stack) -> None:
        """201, the id, what was counted, and where the definition is."""
        response = await post(stack, name="banking")
        assert response.status_code == 201
        assert response.json() == {
            "id": SET_ID,
            "name": "banking",
            "labels": 3,
            "descriptions": 4,
            "labels_cached": 0,
            "warnings": [],
        }
        assert httpx.URL("http://test/v1/label-sets").join(response.headers["location"]).path.endswith(f"sets/{SET_ID}")

    async def test_a_known_set(self, stack: Stack) -> None:
        """200, the same id in any order; it keeps its name, and nothing is encoded again."""
        await post(stack, name="banking")
        encoded = len(stack.encoded)
        response = await post(stack, LABELS[::-1], name="another name")
        assert response.status_code == 200
        answer = response.json()
        assert (answer["id"], answer["name"], answer["labels_cached"]) == (SET_ID, "banking", 4)
        assert len(stack.encoded) == encoded

    async def test_labels_are_encoded_before_the_answer(self, stack: Stack, run_stack: RunStack, bert: Any) -> None:
        """The first request with the id encodes no label, on another scorer neither, which needs one read for them."""
        await post(stack)
        keys = [key for key in stack.store._entries._entries if ":list:" in key or ":label:" in key]
        assert len(keys) == 1 + 4 + 2  # the list and its labels, and those of the warm-up
        async with run_stack(bert, store=stack.store) as other:
            answer = await other.ask(text="card", label_set=SET_ID)
            assert answer["usage"] == {"text_tokens": 3, "labels": 4, "labels_cached": 4}
            assert [batch.priority for batch in other.encoded] == [Priority.DOCUMENTS]

    async def test_one_label_is_enough(self, stack: Stack) -> None:
        """Whether two are needed depends on what is asked of the set, so classify says it, naming the id."""
        set_id = (await post(stack, ["card"])).json()["id"]
        error = refused(await stack.post(text="card", label_set=set_id), 422, "invalid_input")
        assert error["loc"] == ["label_set"]
        assert "1 label given, at least 2 needed" in error["error"]
        assert (await stack.ask(text="card", label_set=set_id, return_logits=True))["results"][0]["score"] == 1.0

    @pytest.mark.parametrize(
        ("body", "loc", "words"),
        [
            ({}, ["labels"], "is missing"),
            ({"labels": "a, b"}, ["labels"], "must be a list of labels"),
            ({"labels": []}, ["labels"], "0 labels given, at least 1 needed"),
            ({"labels": ["a"] * 5}, ["labels"], "at most 4 allowed"),
            ({"labels": ["a", ""]}, ["labels", 1], "empty"),
            ({"labels": ["a", "b", "a"]}, ["labels", 2], "same label as number 0"),
            ({"labels": ["a", "\u200b"]}, ["labels", 1], "no character that the tokenizer can read"),
            (
                {"labels": [{"name": "a", "description": ["b", "\u200b"]}]},
                ["labels", 0, "description", 1],
                "no character",
            ),
            ({"labels": ["a", "\ud800"]}, ["labels", 1], "lone surrogate"),
            ({"labels": ["a"], "name": ""}, ["name"], "empty"),
            ({"labels": ["a"], "name": 3}, ["name"], "must be a string"),
            ({"labels": ["a"], "name": "x" * 201}, ["name"], "at most 200"),
            ({"labels": ["a"], "text": "b"}, ["text"], "is not a key of this request; it takes labels, name"),
            ({"labels": ["a", "x" * 1_100]}, ["labels"], r"at most 1,024 are kept (label_sets.max_bytes)"),
        ],
    )
    async def test_bad_sets_are_named(
        self, run_stack: RunStack, bert: Any, body: dict[str, Any], loc: list[Any], words: str
    ) -> None:
        """As in classify: the place in the request, what is wrong there; and nothing is kept."""
        async with run_stack(bert, limits={"max_labels": 4}, label_sets={"max_bytes": 1_024}) as stack:
            response = await stack.client.post("/v1/label-sets", content=json.dumps(body))
            error = refused(response, 422, "invalid_input")
            assert error["loc"] == loc
            assert words in error["error"]
            assert not stack.store._forever

    async def test_bodies_are_read_as_in_classify(self, run_stack: RunStack, bert: Any) -> None:
        """What is no JSON, and what is too large, has the errors that it has there."""
        async with run_stack(bert, limits={"max_body_bytes": 1_024}) as stack:
            refused(await stack.client.post("/v1/label-sets", content=b"{"), 422, "invalid_input")
            refused(await stack.client.post("/v1/label-sets", content=b" " * 2_000), 413, "body_too_large")


class TestLint:
    async def test_what_is_told(self, run_stack: RunStack, bert: Any) -> None:
        """Labels that were cut, that tokenise alike, and that are near-duplicates, each with its place and its type."""
        labels = ["card payment", "日本", "本日", {"name": "long", "description": "cash " * 200}, "Card-Payment", "x"]
        async with run_stack(bert, label_sets=FAR) as stack:
            warnings = (await post(stack, labels)).json()["warnings"]
            assert [(w["loc"], w["type"]) for w in warnings] == [
                (["labels", 3], "truncated"),
                (["labels", 2], "indistinguishable"),
                (["labels", 4], "near_duplicate"),
            ]
            assert "'card payment' of label number 0" in warnings[2]["message"]

    async def test_places_are_those_of_the_request(self, stack: Stack) -> None:
        """Who posts a known set in another order is told of the own order."""
        await post(stack, ["a", "b", "A!"])
        [warning] = (await post(stack, ["b", "A!", "a"])).json()["warnings"]
        assert warning["loc"] == ["labels", 2]

    async def test_by_representation(self, run_stack: RunStack, minilm: Any) -> None:
        """With the shipped head and the threshold as it comes: a turned phrase is near, another topic is not."""
        async with run_stack(minilm) as stack:
            labels = ["schedule meeting", "lost card", "meeting schedule", "stolen card"]
            [warning] = (await post(stack, labels)).json()["warnings"]
            assert (warning["loc"], warning["type"]) == (["labels", 2], "near_duplicate")

    @pytest.mark.data
    async def test_the_documented_threshold(self, run_stack: RunStack, minilm: Any, data_root: Path) -> None:
        """Of two real label sets the shipped head finds as documented no pair in one, and one in the other."""
        banking = json.loads((data_root / "banking77" / "categories.json").read_text(encoding="utf-8"))
        clinc = json.loads((data_root / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
        found = []
        async with run_stack(minilm) as stack:
            for names in (banking, sorted({intent for _, intent in clinc["train"]})):
                labels = [name.replace("_", " ") for name in names]
                warnings = (await post(stack, labels)).json()["warnings"]
                found.append([labels[warning["loc"][1]] for warning in warnings])
        assert found == [[], ["schedule meeting"]]


class TestClassifying:
    async def test_the_answer_is_that_of_the_labels(self, any_stack: Stack) -> None:
        """With an id the answer is, to the last digit, the one that the labels themselves get."""
        set_id = (await post(any_stack)).json()["id"]
        options = {"texts": ["card", "cash not received"], "explain": "all", "return_logits": True}
        brought = await any_stack.ask(labels=LABELS, **options)
        assert await any_stack.ask(label_set=set_id, **options) == brought

    async def test_ties_are_in_the_first_callers_order(self, stack: Stack) -> None:
        """Who posts the set first decides the order of equal scores, whoever posts it later."""
        await post(stack, ["日本", "本日", "card"])
        set_id = (await post(stack, ["本日", "card", "日本"])).json()["id"]
        scores = (await stack.ask(text="payment", label_set=set_id))["results"][0]["scores"]
        order = [score["label"] for score in scores]
        assert order.index("日本") < order.index("本日")

    async def test_labels_are_neither_checked_nor_hashed_again(
        self, stack: Stack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Requests with an id use the one object of the set: nothing of its strings is looked at in the ingress."""
        set_id = (await post(stack)).json()["id"]
        stack.sent.clear()
        monkeypatch.setattr("tokenalign.labels._parse", None)
        await asyncio.gather(*(stack.ask(text=f"card {i}", label_set=set_id) for i in range(3)))
        sets = [asked.labels for batch in stack.sent for asked in batch.label_sets]
        assert len({id(labels) for labels in sets}) == 1

    async def test_ids_and_labels_share_a_batch(self, stack: Stack) -> None:
        """In one batch, the set of an id and the same labels sent along are one set."""
        set_id = (await post(stack)).json()["id"]
        stack.sent.clear()
        one, other = await stack.together(
            {"text": "card", "label_set": set_id}, {"text": "cash", "labels": LABELS, "top_k": 1}
        )
        assert (one.status_code, other.status_code) == (200, 200)
        [batch] = stack.sent
        assert len(batch.label_sets) == 1

    async def test_an_unknown_id(self, stack: Stack) -> None:
        """404 at the id, with what to do."""
        error = refused(await stack.post(text="card", label_set="0" * 32), 404, "unknown_label_set")
        assert error["loc"] == ["label_set"]
        assert "send its labels to POST /v1/label-sets again" in error["error"]

    @pytest.mark.parametrize(
        ("body", "loc", "words"),
        [
            ({"text": "card"}, ["labels"], "is missing; send the candidate labels as a list, or the id"),
            ({"text": "card", "labels": ["a", "b"], "label_set": SET_ID}, ["label_set"], "both labels and label_set"),
            ({"text": "card", "label_set": "banking"}, ["label_set"], "is no id of a label set"),
            ({"text": "", "label_set": SET_ID}, ["text"], "empty"),
            ({"text": "card", "label_set": SET_ID, "top_k": 0}, ["top_k"], "at least 1"),
        ],
    )
    async def test_bad_requests(self, stack: Stack, body: dict[str, Any], loc: list[Any], words: str) -> None:
        """Exactly one of labels and id, an id that can be one, and everything else checked as ever."""
        await post(stack)
        error = refused(await stack.post(**body), 422, "invalid_input")
        assert error["loc"] == loc
        assert words in error["error"]

    async def test_a_limit_that_was_lowered(self, run_stack: RunStack, bert: Any) -> None:
        """A set that was kept under a higher limit is refused as its labels would be, at the id."""
        store = MemoryStore(MIB)
        async with run_stack(bert, store=store) as before:
            await post(before)
        async with run_stack(bert, store=store, limits={"max_labels": 2}) as after:
            error = refused(await after.post(text="card", label_set=SET_ID), 422, "invalid_input")
            assert error["loc"] == ["label_set"]


class TestDefinitions:
    async def test_get(self, stack: Stack) -> None:
        """Name and labels in the form in which they can be sent again."""
        await post(stack, name="banking")
        response = await stack.client.get(f"/v1/label-sets/{SET_ID}")
        assert (response.status_code, response.json()) == (200, {"id": SET_ID, "name": "banking", "labels": LABELS})
        again = response.json()
        assert (await post(stack, again["labels"], name=again["name"])).status_code == 200

    @pytest.mark.parametrize("set_id", ["0" * 32, "banking", "%00", "x" * 5_000])
    async def test_get_unknown(self, stack: Stack, set_id: str) -> None:
        """404 with what to do; also for what can't be an id."""
        error = refused(await stack.client.get(f"/v1/label-sets/{set_id}"), 404, "unknown_label_set")
        assert error["loc"] == []
        assert "POST /v1/label-sets again" in error["error"]
        assert len(error["error"]) < 500

    async def test_delete(self, stack: Stack) -> None:
        """204 without a body, a second time too; then the id is unknown, and may be posted again as new."""
        await post(stack)
        for _ in range(2):
            response = await stack.client.delete(f"/v1/label-sets/{SET_ID}")
            assert (response.status_code, response.content) == (204, b"")
        refused(await stack.client.get(f"/v1/label-sets/{SET_ID}"), 404, "unknown_label_set")
        refused(await stack.post(text="card", label_set=SET_ID), 404, "unknown_label_set")
        assert (await post(stack)).status_code == 201

    async def test_another_method(self, stack: Stack) -> None:
        """405 in the shape of all errors."""
        refused(await stack.client.put(f"/v1/label-sets/{SET_ID}"), 405, "method_not_allowed")
        refused(await stack.client.get("/v1/label-sets"), 405, "method_not_allowed")


class TestTenants:
    async def test_the_seam(self, stack: Stack) -> None:
        """Below the routes a tenant may be named: then the set is the tenant's own, to read and to delete."""
        labels = LabelSet.of(LABELS)
        await stack.ingress.add_label_set(labels, None, tenant="one")
        assert (await stack.ingress.label_set(SET_ID, tenant="one")).labels == labels
        await stack.ingress.delete_label_set(SET_ID, tenant="two")
        for tenant in ("two", None):
            with pytest.raises(UnknownLabelSetError):
                await stack.ingress.label_set(SET_ID, tenant=tenant)
        await stack.ingress.delete_label_set(SET_ID, tenant="one")
        with pytest.raises(UnknownLabelSetError):
            await stack.ingress.label_set(SET_ID, tenant="one")


class TestTrouble:
    async def test_a_store_that_is_down(self, run_stack: RunStack, bert: Any) -> None:
        """503 and not 404, with Retry-After; what is in memory, or is sent along, is served all the same."""
        store = BrokenStore(MIB)
        async with run_stack(bert, store=store) as stack:
            await post(stack)
            store.broken = True
            other = Definition.of(LabelSet.of(["x", "y"]), None).set_id
            for response in (
                await post(stack, ["x", "y"]),
                await stack.client.get(f"/v1/label-sets/{other}"),
                await stack.client.delete(f"/v1/label-sets/{SET_ID}"),
                await stack.post(text="card", label_set=other),
            ):
                refused(response, 503, "label_sets_unavailable")
                assert response.headers["retry-after"] == "1"
            assert (await stack.client.get(f"/v1/label-sets/{SET_ID}")).status_code == 200
            await stack.ask(text="card", label_set=SET_ID)
            await stack.ask(text="card", labels=["x", "y"])
            store.broken = False
            assert (await post(stack, ["x", "y"])).status_code == 201

    async def test_no_store_in_the_settings(self, run_stack: RunStack, bert: Any) -> None:
        """503 that names the setting, and no word of trying again; labels that are sent along are served."""
        async with run_stack(bert, store=None) as stack:
            for response in (
                await post(stack),
                await stack.client.get(f"/v1/label-sets/{SET_ID}"),
                await stack.client.delete(f"/v1/label-sets/{SET_ID}"),
                await stack.post(text="card", label_set=SET_ID),
            ):
                error = refused(response, 503, "label_sets_unavailable")
                assert "label_cache.url is none" in error["error"]
                assert "retry-after" not in response.headers
            await stack.ask(text="card", labels=LABELS)

    async def test_before_the_start(self, run_stack: RunStack, bert: Any) -> None:
        """An ingress that has not met the encoder yet says so."""
        async with run_stack(bert, start=False) as stack:
            refused(await post(stack), 503, "not_ready")

    @pytest.mark.parametrize("error", [ReplicaLostError("lost"), FingerprintMismatchError("rows", "a", "b")])
    async def test_a_lost_or_changing_replica(self, stack: Stack, error: Exception) -> None:
        """Is tried once more; the second time it is a 503, and the set is not kept without its labels encoded."""
        stack.failures = [error, error]
        refused(await post(stack), 503, "not_ready")
        assert not stack.store._forever
        stack.failures = [error]
        assert (await post(stack)).status_code == 201

    async def test_a_rollout(self, stack: Stack, bert: Any) -> None:
        """A definition outlives the model: its labels are encoded anew when the set is used, or posted again."""
        first = await post(stack)
        served = bert.served
        bfloat16 = Backbone.load(served.config, base=served.folder, device="cpu", dtype="bfloat16")
        await stack.replace_encoder(bert.with_backbone(bfloat16))
        answer = await stack.ask(text="card", label_set=SET_ID)
        assert answer["usage"]["labels_cached"] == 0
        assert (await post(stack)).json() == first.json() | {"labels_cached": 4}

    async def test_numbers(self, stack: Stack) -> None:
        """A model that gives no numbers for a label is a 500, and the set is not kept."""
        stack.failures = [NumericalError("private")]
        refused(await post(stack), 500, "numerical")
        assert not stack.store._forever

    async def test_more_than_can_be_encoded_in_time(self, run_stack: RunStack, gated: Any, until: Any) -> None:
        """504 that says to send it again; what was encoded meanwhile is kept, so the second time is quick."""
        async with run_stack(gated.model, batching={"request_timeout_s": 0.05}) as stack:
            gated.backbone.gate.clear()
            error = refused(await post(stack), 504, "deadline_exceeded")
            assert "send the set again" in error["error"]
            gated.backbone.gate.set()
            await stack.drain()
            assert (await post(stack)).json()["labels_cached"] == 4


class TestWarmedLists:
    @pytest.fixture
    def listed(self, tmp_path: Path) -> Path:
        path = tmp_path / "labels.txt"
        path.write_text('card payment\n\n{"name": "Bargeld", "description": ["cash", "naïve 日本"]}\na, b\n')
        return path

    def settings(self, *paths: Path) -> dict[str, Any]:
        return {"warm": [{"file": str(path), "name": path.stem} for path in paths], **FAR}

    async def test_known_and_encoded_before_ready(self, run_stack: RunStack, bert: Any, listed: Path) -> None:
        """The first request with the id of a list of the settings finds all labels encoded."""
        async with run_stack(bert, label_sets=self.settings(listed)) as stack:
            answer = await stack.ask(text="card", label_set=SET_ID)
            assert answer["usage"]["labels_cached"] == 4
            assert (await stack.client.get(f"/v1/label-sets/{SET_ID}")).json()["name"] == "labels"

    async def test_not_ready_while_they_are_encoded(
        self, run_stack: RunStack, gated: Any, listed: Path, until: Any
    ) -> None:
        """Readiness waits for the lists."""
        async with run_stack(gated.model, label_sets=self.settings(listed), start=False) as stack:
            await stack.scorer.start()
            passes = len(gated.backbone.seen)

            def hold(_: Any, states: Any) -> Any:
                if len(gated.backbone.seen) == passes + 2:  # after the warm-up's text and labels
                    gated.backbone.gate.clear()
                return states

            gated.backbone.change = hold
            starting = asyncio.create_task(stack.ingress.start())
            await until(lambda: len(gated.backbone.seen) == passes + 3)
            refused(await stack.client.get("/health/ready"), 503, "not_ready")
            gated.backbone.gate.set()
            await starting
            assert (await stack.client.get("/health/ready")).status_code == 200

    async def test_other_replicas_know_them(self, run_stack: RunStack, bert: Any, listed: Path) -> None:
        """A replica of older settings, or none, finds the list in the store."""
        store = MemoryStore(MIB)
        warmed = run_stack(bert, store=store, label_sets=self.settings(listed))
        async with warmed, run_stack(bert, store=store) as other:
            await other.ask(text="card", label_set=SET_ID)

    async def test_a_store_that_is_down_does_not_hinder_the_start(
        self, run_stack: RunStack, bert: Any, listed: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Readiness doesn't depend on the store: the list is known to the replica, and the log says what is missing."""
        store = BrokenStore(MIB)
        store.broken = True
        async with run_stack(bert, store=store, label_sets=self.settings(listed)) as stack:
            await stack.ask(text="card", label_set=SET_ID)
            assert "labels.txt is known to its own replicas alone" in caplog.text

    async def test_a_server_that_lost_everything(self, run_stack: RunStack, bert: Any, listed: Path) -> None:
        """A list of the settings survives the loss of the store's content."""
        async with run_stack(bert, label_sets=self.settings(listed)) as stack:
            stack.store._forever.clear()
            await stack.ask(text="card", label_set=SET_ID)
            assert (await post(stack)).status_code == 200

    async def test_it_is_not_deleted(self, run_stack: RunStack, bert: Any, listed: Path) -> None:
        """409 that says where it can be removed."""
        async with run_stack(bert, label_sets=self.settings(listed)) as stack:
            response = await stack.client.delete(f"/v1/label-sets/{SET_ID}")
            assert "remove it there" in refused(response, 409, "label_set_in_settings")["error"]

    async def test_the_lint_is_logged(
        self, run_stack: RunStack, bert: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What a caller would be told of the set stands in the log, with file and line."""
        path = tmp_path / "labels.txt"
        path.write_text("card\n\nCARD!\ncash\n")
        async with run_stack(bert, label_sets=self.settings(path)):
            assert f"{path}:3: 'CARD!' is hardly told apart from 'card'" in caplog.text

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("card\n\ncard\n", r"label_sets.warm: .*labels.txt:3: 'card' is the same label as number 0"),
            ("card\n\u200b\n", r"label_sets.warm: .*labels.txt:2: .*no character that the tokenizer can read"),
            ("{\n", r"labels.txt:1: begins with"),
            ("", r"labels.txt has no labels"),
            ("card\n" + "x" * 2_000, r"label_sets.warm: .*labels.txt: the label set takes .*label_sets.max_bytes"),
        ],
    )
    async def test_a_bad_list_fails_the_start(
        self, run_stack: RunStack, bert: Any, tmp_path: Path, text: str, words: str
    ) -> None:
        """What can't be served is said before anything is called ready, with file and line."""
        path = tmp_path / "labels.txt"
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            async with run_stack(bert, label_sets={**self.settings(path), "max_bytes": 1_024}):
                pass


@pytest.mark.parametrize(
    ("error", "status", "error_type", "headers"),
    [
        (UnknownLabelSetError("x", ("label_set",)), 404, "unknown_label_set", {}),
        (LabelSetsUnavailableError("x", passing=True), 503, "label_sets_unavailable", {"Retry-After": "1"}),
        (LabelSetsUnavailableError("x", passing=False), 503, "label_sets_unavailable", {}),
        (PinnedLabelSetError("x"), 409, "label_set_in_settings", {}),
    ],
)
def test_each_error_has_its_row(error: Exception, status: int, error_type: str, headers: dict[str, str]) -> None:
    """Status, type, and whether it is worth to try again."""
    found = to_http(error)
    assert (found.status, found.error_type, found.headers) == (status, error_type, headers)


async def test_answers_fit_the_documentation(stack: Stack) -> None:
    """What the routes of label sets answer is what OpenAPI says."""
    openapi = (await stack.client.get("/openapi.json")).json()

    def check(path: str, method: str, response: httpx.Response) -> None:
        documented = openapi["paths"][path][method]["responses"][str(response.status_code)]
        schema = {**documented["content"]["application/json"]["schema"], "components": openapi["components"]}
        jsonschema.Draft202012Validator(schema).validate(response.json())

    sets, one = "/v1/label-sets", "/v1/label-sets/{set_id}"
    for labels in (LABELS, LABELS, ["a", "A!", "日本", "本日", "cash " * 200], []):
        check(sets, "post", await post(stack, labels))
    check(one, "get", await stack.client.get(f"{sets}/{SET_ID}"))
    check(one, "get", await stack.client.get(f"{sets}/nothing"))
    check("/v1/classify", "post", await stack.post(text="a", label_set="0" * 32))
    request = openapi["paths"][sets]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**request, "components": openapi["components"]})
    assert validator.is_valid({"labels": LABELS, "name": "x"})
    assert not validator.is_valid({"name": "x"})
    assert (await stack.client.post(sets, json=request["example"])).status_code == 201
    [parameter] = openapi["paths"][one]["get"]["parameters"]
    assert parameter["name"] == "set_id"
