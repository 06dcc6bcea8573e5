"""The whole service in one process over HTTP: its answers are the library's, and its neighbours may change or end."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from deploy.batching import BatcherClosed
from deploy.http.errors import NotReadyError
from deploy.http.schemas import ClassifyQuery
from deploy.label_cache import StoreError
from deploy.wire import Priority, ReplicaLostError
from tokenalign import LabelSet
from tokenalign.backbone import Backbone
from tokenalign.errors import FingerprintMismatchError, NumericalError

Stack = Any  # the fixtures' class; tests are no package that could be imported from
RunStack = Callable[..., Any]

TEXTS = [
    "I was charged twice for the same card payment.",
    "cash not received, and the card was declined",
    "Why was my top-up declined?  I paid in £ & €!",
    "card",
    "ein Satz über Karten, 日本 card 👍🏽 <think> [SEP] שלום",
    "I was charged twice for the same card payment.",
]
LABELS: list[Any] = [
    "duplicate card payment",
    {"name": "cash", "description": ["cash withdrawal not received", "no cash, though charged"]},
    {"name": "declined", "description": "card declined"},
    "card, not received",
]
DESCRIPTIONS = 5


@pytest.fixture
def classifier(any_stack: Stack, any_pair: Any) -> Any:
    """The library's side of `any_stack`."""
    return any_pair.classifier


def assert_same(result: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The served scores are the library's within 1e-3, in the same order, with the same best label."""
    scores = {score["label"]: score["score"] for score in result["scores"]}
    assert scores == pytest.approx(expected["scores"], abs=1e-3)
    assert result["label"] == expected["label"]
    assert result["score"] == result["scores"][0]["score"] == max(scores.values())
    assert result["truncation"] == expected["truncation"]


class TestAnswers:
    async def test_scores_are_the_librarys(self, any_stack: Stack, classifier: Any) -> None:
        """Several texts of one request get the library's scores and top label, in the order of the texts."""
        answer = await any_stack.ask(texts=TEXTS, labels=LABELS)
        for result, expected in zip(answer["results"], classifier(TEXTS, LABELS), strict=True):
            assert_same(result, expected)
            assert sum(score["score"] for score in result["scores"]) == pytest.approx(1, abs=1e-5)
            assert result.keys() == {"label", "score", "scores", "truncation"}
            assert all(score.keys() == {"label", "score"} for score in result["scores"])

    async def test_alone_or_batched(self, any_stack: Stack) -> None:
        """A text that is asked alone scores as it does in a batch with others."""
        batched = (await any_stack.ask(texts=TEXTS, labels=LABELS, return_logits=True))["results"]
        for text, neighbour in zip(TEXTS, batched, strict=True):
            alone = (await any_stack.ask(text=text, labels=LABELS, return_logits=True))["results"][0]
            assert [s["label"] for s in alone["scores"]] == [s["label"] for s in neighbour["scores"]]
            for one, other in zip(alone["scores"], neighbour["scores"], strict=True):
                assert one["score"] == pytest.approx(other["score"], abs=1e-3)
                assert one["logit"] == pytest.approx(other["logit"], abs=1e-2)

    async def test_cached_or_not_is_the_same(self, any_stack: Stack) -> None:
        """The second answer takes all labels from the cache, and every number in it is the first one's."""
        body = {"text": TEXTS[0], "labels": LABELS, "explain": "all", "return_logits": True}
        first, second = await any_stack.ask(**body), await any_stack.ask(**body)
        assert (first["usage"]["labels_cached"], second["usage"]["labels_cached"]) == (0, DESCRIPTIONS)
        assert first["results"] == second["results"]
        assert [batch.priority for batch in any_stack.encoded].count(Priority.LABELS) == 1

    async def test_permuted_labels_are_the_same_list(self, any_stack: Stack) -> None:
        """Another order of the candidates hits the cache and changes no score."""
        first = await any_stack.ask(text=TEXTS[1], labels=LABELS)
        shuffled = random.Random(1).sample(LABELS, len(LABELS))
        assert shuffled != LABELS
        second = await any_stack.ask(text=TEXTS[1], labels=shuffled)
        assert second["usage"]["labels_cached"] == DESCRIPTIONS
        scores = [{s["label"]: s["score"] for s in answer["results"][0]["scores"]} for answer in (first, second)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-6)

    @pytest.mark.parametrize("explain", [True, "all"])
    async def test_matches_are_the_librarys(self, any_stack: Stack, classifier: Any, explain: Any) -> None:
        """The matched words and spans are the library's, each span indexes the text, contributions sum to the logit."""
        answer = await any_stack.ask(texts=TEXTS, labels=LABELS, explain=explain, return_logits=True)
        expected = classifier(TEXTS, LABELS, explain=explain, return_logits=True)
        for text, result, reference in zip(TEXTS, answer["results"], expected, strict=True):
            assert_same(result, reference)
            places = ("label", "token", "label_span", "span", "text")
            found = [[match[key] for key in places] for match in result["matches"]]
            assert found == [[match[key] for key in places] for match in reference["matches"]]
            for match, other in zip(result["matches"], reference["matches"], strict=True):
                assert text[slice(*match["span"])] == match["text"]
                assert match["similarity"] == pytest.approx(other["similarity"], abs=2e-3)
            logits = {score["label"]: score["logit"] for score in result["scores"]}
            assert logits == pytest.approx(reference["logits"], abs=2e-2)
            explained = {match["label"] for match in result["matches"]}
            assert explained == (set(logits) if explain == "all" else {result["label"]})
            for label in explained:
                parts = [match["contribution"] for match in result["matches"] if match["label"] == label]
                assert sum(parts) == pytest.approx(logits[label], abs=1e-3)

    async def test_label_spans_index_the_description(self, any_stack: Stack) -> None:
        """The token of a match is what its span cuts out of one of the label's descriptions."""
        answer = await any_stack.ask(text=TEXTS[0], labels=LABELS, explain="all")
        wordings = {label["name"]: label["description"] for label in LABELS if isinstance(label, dict)}
        for match in answer["results"][0]["matches"]:
            given = wordings.get(match["label"], match["label"])
            given = [given] if isinstance(given, str) else given
            assert match["token"] in {description[slice(*match["label_span"])] for description in given}

    async def test_the_largest_of_several_descriptions_counts(self, stack: Stack) -> None:
        """A label's logit is the largest of its descriptions' logits."""
        several = await stack.ask(text=TEXTS[0], labels=[LABELS[1]], return_logits=True)
        single = await stack.ask(text=TEXTS[0], labels=LABELS[1]["description"], return_logits=True)
        assert several["results"][0]["scores"][0]["logit"] == pytest.approx(
            max(score["logit"] for score in single["results"][0]["scores"]), abs=1e-6
        )

    async def test_top_k_shortens_the_list_alone(self, stack: Stack) -> None:
        """The best k labels come with the scores that they have over all candidates, matches of these alone."""
        full = (await stack.ask(text=TEXTS[0], labels=LABELS))["results"][0]
        for k in (1, 2, len(LABELS), 10**30):
            answer = await stack.ask(text=TEXTS[0], labels=LABELS, top_k=k, explain="all")
            result = answer["results"][0]
            assert result["scores"] == full["scores"][:k]
            assert {match["label"] for match in result["matches"]} == {score["label"] for score in result["scores"]}
        assert (await stack.ask(text=TEXTS[0], labels=LABELS, top_k=None))["results"][0] == full

    async def test_logits_need_no_second_label(self, stack: Stack, bert: Any) -> None:
        """One label is enough where logits are asked for; its score then is 1."""
        answer = await stack.ask(text=TEXTS[0], labels=["card"], return_logits=True)
        [score] = answer["results"][0]["scores"]
        assert score["score"] == 1.0
        expected = bert.classifier(TEXTS[0], ["card"], return_logits=True)["logits"]["card"]
        assert score["logit"] == pytest.approx(expected, abs=1e-2)

    async def test_names_come_back_as_sent(self, stack: Stack) -> None:
        """White space, commas and composed characters of a name are the caller's own in the answer."""
        names = [" card ", "a, b", "e\u0301te\u0301", "日本 👍🏽"]
        answer = await stack.ask(text="card", labels=names, explain="all")
        assert {score["label"] for score in answer["results"][0]["scores"]} == set(names)
        assert {match["label"] for match in answer["results"][0]["matches"]} == set(names)

    async def test_ties_keep_the_callers_order(self, stack: Stack) -> None:
        """Labels that the model can't tell apart come in the order sent, with a warning that says so."""
        labels = ["日日", "card", "本本"]
        for order in (labels, labels[::-1]):
            answer = await stack.ask(text="card payment", labels=order)
            ranked = [score["label"] for score in answer["results"][0]["scores"]]
            assert [label for label in ranked if label != "card"] == [label for label in order if label != "card"]
            [warning] = answer["warnings"]
            assert (warning["type"], warning["loc"]) == ("indistinguishable", ["labels", 2])

    async def test_usage_counts_what_was_read(self, any_stack: Stack, any_pair: Any) -> None:
        """Tokens of all texts, descriptions of all labels, and those of them that were not encoded anew."""
        answer = await any_stack.ask(texts=TEXTS, labels=LABELS)
        tokens = len(any_pair.served.tokenizer.documents(TEXTS).tokens.values)
        assert answer["usage"] == {"text_tokens": tokens, "labels": DESCRIPTIONS, "labels_cached": 0}
        answer = await any_stack.ask(texts=TEXTS, labels=[*LABELS, "one more"])
        assert answer["usage"]["labels"] == DESCRIPTIONS + 1

    async def test_one_new_label_is_encoded_alone(self, stack: Stack) -> None:
        """A list that shares labels with an earlier one costs the encoding of the others only."""
        await stack.ask(text="card", labels=LABELS)
        await stack.drain()
        stack.encoded.clear()
        answer = await stack.ask(text="card", labels=[*LABELS, "one more"])
        assert answer["usage"]["labels_cached"] == DESCRIPTIONS
        [labels] = [batch for batch in stack.encoded if batch.priority is Priority.LABELS]
        assert len(labels.lengths) == 1

    async def test_equal_texts_are_encoded_once(self, stack: Stack) -> None:
        """A text that stands three times in a request crosses to the encoder once and is answered three times."""
        answer = await stack.ask(texts=["card", "cash", "card", "card"], labels=LABELS)
        [batch] = stack.sent
        assert len(batch.documents.lengths) == 2
        assert len(batch.questions) == 4
        assert answer["results"][0] == answer["results"][2] == answer["results"][3] != answer["results"][1]

    async def test_the_answer_names_its_model(self, any_stack: Stack, any_pair: Any) -> None:
        """Name and fingerprint are those of the library's classifier on the same files, here and in /v1/model."""
        answer = await any_stack.ask(text="card", labels=LABELS)
        classifier = any_pair.classifier
        assert answer["model"] == {"name": classifier.config.name, "fingerprint": classifier.fingerprint}
        model = (await any_stack.client.get("/v1/model")).json()
        assert (model["name"], model["fingerprint"]) == (classifier.config.name, classifier.fingerprint)


class TestTruncation:
    async def test_a_cut_text_is_told(self, any_stack: Stack, classifier: Any) -> None:
        """A text over the token limit is answered with where it was cut; what stands behind the cut counts nothing."""
        text = "card payment declined " * 200
        result = (await any_stack.ask(text=text, labels=LABELS))["results"][0]
        assert_same(result, classifier(text, LABELS))
        cut = result["truncation"]
        assert cut["used"] == classifier.config.max_length < cut["tokens"]
        assert 0 < cut["cut_at"] < len(text)
        other = text[: cut["cut_at"]] + "cash " * 200
        assert (await any_stack.ask(text=other, labels=LABELS))["results"][0]["scores"] == result["scores"]

    async def test_a_cut_label_is_a_warning(self, any_stack: Stack, classifier: Any) -> None:
        """A label over the token limit is answered with a warning at its place, for every text of the request once."""
        labels = [*LABELS, {"name": "long", "description": "cash withdrawal " * 200}]
        answer = await any_stack.ask(texts=["card", "cash"], labels=labels)
        [warning] = answer["warnings"]
        assert (warning["type"], warning["loc"]) == ("truncated", ["labels", len(LABELS)])
        assert "128 were used" in warning["message"]
        assert answer["warnings"] == classifier("card", labels)["warnings"]


class TestMixedBatches:
    async def test_callers_with_other_labels_share_a_batch(self, any_stack: Stack, classifier: Any) -> None:
        """Requests with label lists and options of their own travel together, and each gets the library's answer."""
        bodies: list[dict[str, Any]] = [
            {"text": TEXTS[0], "labels": LABELS},
            {"texts": TEXTS[1:3], "labels": ["card", "cash"], "explain": "all"},
            {"text": TEXTS[0], "labels": LABELS[::-1], "top_k": 1},
            {"texts": [TEXTS[0], TEXTS[3]], "labels": LABELS, "return_logits": True, "explain": True},
        ]
        responses = await any_stack.together(*bodies)
        for body, response in zip(bodies, responses, strict=True):
            options = {key: body[key] for key in ("top_k", "explain", "return_logits") if key in body}
            expected = classifier(body.get("texts", [body.get("text")]), body["labels"], **options)
            for result, reference in zip(response.json()["results"], expected, strict=True):
                assert_same(result, reference)
                assert len(result.get("matches", [])) == len(reference.get("matches", []))

    async def test_a_bad_text_is_refused_without_the_others(self, stack: Stack) -> None:
        """One text that can't be read fails its own request at its place; other requests of the moment are answered."""
        bad, good = await asyncio.gather(
            stack.post(texts=["card", "\u200b", "cash"], labels=LABELS), stack.post(text="card", labels=LABELS)
        )
        assert bad.status_code == 422
        assert bad.json()["loc"] == ["texts", 1]
        assert good.status_code == 200

    async def test_an_unreadable_label_fails_its_own_list(self, stack: Stack, bert: Any) -> None:
        """A label without any token fails the requests that brought it, at its place, within a batch with others."""
        bad: dict[str, Any] = {"text": "card", "labels": ["card", "\u200b", "cash"]}
        nested = {"text": "cash", "labels": ["a", "b", {"name": "zero", "description": ["x", "\u200b"]}]}
        good = {"text": "card", "labels": LABELS}
        responses = await stack.together(bad, good, nested, good)
        assert [response.status_code for response in responses] == [422, 200, 422, 200]
        assert [responses[i].json()["loc"] for i in (0, 2)] == [["labels", 1], ["labels", 2, "description", 1]]
        assert_same(responses[1].json()["results"][0], bert.classifier("card", LABELS))

    async def test_numbers_that_fail_for_one_list(self, run_stack: RunStack, gated: Any) -> None:
        """NaN among the rows of one list's labels is an error of its requests, and not kept; others are answered."""
        async with run_stack(gated.model) as stack:
            bad_length = int(gated.model.tokenizer.labels(["bad bad bad bad"]).tokens.lengths[0])

            def poison(batch: Any, states: torch.Tensor) -> torch.Tensor:
                return states * float("nan") if bad_length in batch.lengths else states

            gated.backbone.change = poison
            bad, good = {"text": "card", "labels": ["bad bad bad bad", "a"]}, {"text": "card", "labels": LABELS}
            responses = await stack.together(bad, good)
            assert [response.status_code for response in responses] == [500, 200]
            assert responses[0].json()["error_type"] == "numerical"
            gated.backbone.change = lambda batch, states: states
            again = await stack.ask(**bad)
            assert again["usage"]["labels_cached"] == 0


class TestOverload:
    async def test_a_full_queue_answers_at_once(self, run_stack: RunStack, bert: Any, until: Any) -> None:
        """Past the queue's bound a request gets 429 with Retry-After, while those that wait are answered later."""
        async with run_stack(bert, batching={"max_queue_texts": 2}) as stack:
            stack.slots = 0
            waiting = asyncio.create_task(stack.post(texts=["card", "cash"], labels=LABELS))
            await until(lambda: stack.waiting_texts == 2)
            refused = await stack.post(text="one more", labels=LABELS)
            assert refused.status_code == 429
            assert refused.headers["retry-after"].isdecimal()
            assert int(refused.headers["retry-after"]) >= 1
            error = refused.json()
            assert (error["error_type"], error["loc"]) == ("overloaded", [])
            assert "max_queue_items=2" in error["error"]
            stack.slots = 1
            assert (await waiting).status_code == 200

    async def test_a_slow_queue_refuses_once_many_are_answered(
        self, run_stack: RunStack, bert: Any, until: Any
    ) -> None:
        """While fewer requests than min_open_requests are open nobody is refused for the wait, whatever they bring."""
        async with run_stack(bert, batching={"max_queue_wait_s": 1e-6, "min_open_requests": 2}) as stack:
            stack.slots = 0
            waiting = [asyncio.create_task(stack.post(texts=["card"] * 9, labels=LABELS))]
            await until(lambda: stack.waiting_texts == 9)
            waiting.append(asyncio.create_task(stack.post(text="cash", labels=LABELS)))
            await until(lambda: stack.waiting_texts == 10)
            refused = await stack.post(text="one more", labels=LABELS)
            assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
            assert "the queue is too slow: 10 items wait" in refused.json()["error"]
            waiting[0].cancel()
            await until(lambda: stack.waiting_texts == 1)
            waiting.append(asyncio.create_task(stack.post(text="and one", labels=LABELS)))
            await until(lambda: stack.waiting_texts == 2)
            stack.slots = 1
            assert [response.status_code for response in await asyncio.gather(*waiting[1:])] == [200, 200]

    async def test_more_texts_than_the_queue_holds(self, run_stack: RunStack, bert: Any) -> None:
        """A request that could never be queued is a 422 that says so, not a 429 to be sent again."""
        async with run_stack(bert, batching={"max_queue_texts": 2}) as stack:
            refused = await stack.post(texts=["card", "cash", "not"], labels=LABELS)
            assert (refused.status_code, refused.json()["loc"]) == (422, ["texts"])
            assert "3 items" in refused.json()["error"]
            assert "in parts" in refused.json()["error"]

    async def test_the_deadline(self, run_stack: RunStack, bert: Any) -> None:
        """A request that gets no slot within its time is a 504, and waits no longer."""
        async with run_stack(bert, batching={"request_timeout_s": 2}) as stack:
            stack.slots = 0
            late = await stack.post(text="card", labels=LABELS)
            assert (late.status_code, late.json()["error_type"]) == (504, "deadline_exceeded")
            assert stack.waiting_texts == 0

    async def test_a_cancelled_request_leaves_the_queue(self, stack: Stack, until: Any) -> None:
        """A caller who goes away takes its texts out of the queue; nothing is computed for it, others are served."""
        stack.slots = 0
        gone = asyncio.create_task(stack.post(texts=["gone", "away"], labels=LABELS))
        stays = asyncio.create_task(stack.post(text="card", labels=LABELS))
        await until(lambda: stack.waiting_texts == 3)
        gone.cancel()
        await until(lambda: stack.waiting_texts == 1)
        stack.slots = 1
        assert (await stays).status_code == 200
        assert gone.cancelled()
        [batch] = stack.sent
        assert len(batch.documents.lengths) == 1

    async def test_a_cancelled_request_in_flight(self, run_stack: RunStack, gated: Any, until: Any) -> None:
        """A caller who goes away while its batch is computed costs the others of that batch nothing."""
        async with run_stack(gated.model) as stack:
            passes = len(gated.backbone.seen)
            gated.backbone.gate.clear()
            stack.slots = 0
            gone = asyncio.create_task(stack.post(text="gone", labels=LABELS))
            stays = asyncio.create_task(stack.post(text="card", labels=LABELS))
            await until(lambda: stack.waiting_texts == 2)
            stack.slots = 1
            await until(lambda: len(gated.backbone.seen) > passes)
            gone.cancel()
            await until(gone.done)
            gated.backbone.gate.set()
            assert (await stays).status_code == 200

    async def test_queued_tokens_travel_with_a_batch(self, run_stack: RunStack, bert: Any) -> None:
        """A batch tells the encoder how many tokens are left behind it, which the autoscaler can't see otherwise."""
        async with run_stack(bert, batching={"max_batch_texts": 1}) as stack:
            await stack.ask(texts=["card", "cash"], labels=LABELS)
            waiting = [batch.documents.queued_tokens for batch in stack.sent]
            assert waiting == [len(stack.sent[1].documents.ids), 0]

    async def test_long_texts_are_tokenised_beside_the_loop(self, stack: Stack, bert: Any) -> None:
        """Texts of many characters together get the same answer, though they are tokenised on a thread."""
        texts = [f"card payment {i} " + "declined " * 2_000 for i in range(2)]
        answer = await stack.ask(texts=texts, labels=LABELS)
        for result, expected in zip(answer["results"], bert.classifier(texts, LABELS), strict=True):
            assert_same(result, expected)
        refused = await stack.post(texts=["card " * 5_000, "\u200b"], labels=LABELS)
        assert (refused.status_code, refused.json()["loc"]) == (422, ["texts", 1])


class TestLostReplicas:
    async def test_once_is_tried_again(self, stack: Stack) -> None:
        """A replica that ends in the middle of a batch costs nobody an answer."""
        stack.failures = [ReplicaLostError("the encoder ended")]
        await stack.ask(text="card", labels=LABELS)
        assert len(stack.sent) == 2

    async def test_twice_is_a_503(self, stack: Stack) -> None:
        """After the second loss the caller is told to come again; the next request is served."""
        stack.failures = [ReplicaLostError("the encoder ended"), ReplicaLostError("the scorer ended")]
        response = await stack.post(text="card", labels=LABELS)
        assert (response.status_code, response.json()["error_type"]) == (503, "not_ready")
        assert response.headers["retry-after"] == "1"
        assert len(stack.sent) == 2
        await stack.ask(text="card", labels=LABELS)

    async def test_an_encoder_that_is_lost_while_it_encodes_labels(self, stack: Stack) -> None:
        """A replica that ends while it encodes labels, not documents, is tried again as well."""
        inner, failures = stack.encoder, [ReplicaLostError("the encoder ended")]

        class Flaky:
            describe = inner.describe
            close = inner.close

            async def encode(self, batch: Any) -> Any:
                if batch.priority is Priority.LABELS and failures:
                    raise failures.pop()
                return await inner.encode(batch)

        stack.encoder = Flaky()
        await stack.ask(text="card", labels=LABELS)
        assert not failures

    async def test_other_errors_are_not_tried_again(self, stack: Stack) -> None:
        """What would fail again is sent once: numbers, and errors that nobody foresaw."""
        for error, kind in ((NumericalError("NaN"), "numerical"), (RuntimeError("private"), "internal")):
            stack.failures = [error]
            stack.sent.clear()
            response = await stack.post(text="card", labels=LABELS)
            assert (response.status_code, response.json()["error_type"]) == (500, kind)
            assert "private" not in response.text
            assert len(stack.sent) == 1


@dataclass(frozen=True)
class Rollout:
    """The same head on the same encoder in another dtype: what a changed setting rolls out."""

    model: Any
    scores: Callable[[str, list[Any]], dict[str, float]]


@pytest.fixture(scope="session")
def rollout(bert: Any) -> Rollout:
    """The tiny BERT in bfloat16."""
    from tokenalign import TokenAlignClassifier

    served = bert.served
    backbone = Backbone.load(served.config, base=served.folder, device="cpu", dtype="bfloat16")
    changed = bert.with_backbone(backbone)
    library = TokenAlignClassifier(served.config, backbone, served.tokenizer, served.head, served.head_digest)
    return Rollout(changed, lambda text, labels: library(text, labels)["scores"])


class TestRollouts:
    async def test_a_changed_encoder_is_met_anew(self, stack: Stack, rollout: Rollout) -> None:
        """Ingress and scorer, both stale, ask the new encoder what it serves; the answer is the new model's."""
        old = await stack.ask(text=TEXTS[0], labels=LABELS)
        await stack.replace_encoder(rollout.model)
        stack.sent.clear()
        new = await stack.ask(text=TEXTS[0], labels=LABELS)
        assert len(stack.sent) == 2
        assert new["model"]["fingerprint"] == rollout.model.fingerprint(rollout.model.backbone.identity)
        assert new["model"]["fingerprint"] != old["model"]["fingerprint"]
        assert new["usage"]["labels_cached"] == 0
        scores = {score["label"]: score["score"] for score in new["results"][0]["scores"]}
        assert scores == pytest.approx(rollout.scores(TEXTS[0], LABELS), abs=1e-3)
        assert (await stack.client.get("/v1/model")).json()["fingerprint"] == new["model"]["fingerprint"]

    async def test_a_change_between_documents_and_labels(self, stack: Stack, rollout: Rollout) -> None:
        """An encoder that changes after the documents, before the labels, costs one more try and mixes nothing."""
        inner, changed = stack.encoder, asyncio.Event()

        class Changing:
            describe = inner.describe
            close = inner.close

            async def encode(self, batch: Any) -> Any:
                if len(batch.lengths) > 1:  # the labels, which are asked for at the same time as the text
                    await changed.wait()
                    return await stack.encoder.encode(batch)
                rows = await inner.encode(batch)
                await stack.replace_encoder(rollout.model)
                changed.set()
                return rows

        stack.encoder = Changing()
        answer = await stack.ask(text=TEXTS[0], labels=LABELS)
        assert len(stack.sent) == 2
        assert answer["model"]["fingerprint"] == rollout.model.fingerprint(rollout.model.backbone.identity)
        scores = {score["label"]: score["score"] for score in answer["results"][0]["scores"]}
        assert scores == pytest.approx(rollout.scores(TEXTS[0], LABELS), abs=1e-3)

    async def test_one_answer_is_of_one_model(self, run_stack: RunStack, bert: Any, rollout: Rollout) -> None:
        """A request whose texts fell before and after the change is a 503, never an answer with scores of both."""
        async with run_stack(bert, batching={"max_batch_texts": 1}) as stack:
            stack.slots = 1
            send = stack.scorer.score

            async def score_then_change(batch: Any) -> Any:
                scored = await send(batch)
                stack.scorer.score = send
                await stack.replace_encoder(rollout.model)
                return scored

            stack.scorer.score = score_then_change
            response = await stack.post(texts=["card", "cash"], labels=LABELS)
            assert (response.status_code, response.json()["error_type"]) == (503, "not_ready")
            again = await stack.ask(texts=["card", "cash"], labels=LABELS)
            assert again["model"]["fingerprint"] == rollout.model.fingerprint(rollout.model.backbone.identity)

    async def test_a_second_mismatch_is_a_503(self, stack: Stack) -> None:
        """After one more try the caller is told that the model changes, and to come again."""
        stack.failures = [FingerprintMismatchError("the rows", "a", "b")] * 2
        response = await stack.post(text="card", labels=LABELS)
        assert (response.status_code, response.json()["error_type"]) == (503, "not_ready")
        assert response.headers["retry-after"] == "1"
        assert len(stack.sent) == 2
        await stack.ask(text="card", labels=LABELS)

    async def test_an_encoder_with_another_head_is_refused(
        self, stack: Stack, bert_backbone: Any, make_head: Any, load_pair: Any
    ) -> None:
        """An ingress can't answer for an encoder with another head: 503, and nothing of it is cached."""
        foreign = load_pair(make_head(bert_backbone, seed=9))
        await stack.replace_encoder(foreign.served)
        await stack.drain()
        response = await stack.post(text="card", labels=["never", "seen before"])
        assert (response.status_code, response.json()["error_type"]) == (503, "not_ready")
        assert not [batch for batch in stack.encoded if batch.priority is Priority.LABELS]

    async def test_projection_may_move_while_serving(self, stack: Stack, bert: Any, run_stack: RunStack) -> None:
        """An encoder that stops projecting in a rollout is understood by standing scorers, since rows say so."""
        async with run_stack(bert, model={"device": "cpu", "project_on_encoder": False}) as other:
            stack.encoder, own = other.encoder, stack.encoder
            try:
                result = (await stack.ask(text=TEXTS[0], labels=LABELS))["results"][0]
            finally:
                stack.encoder = own
        assert_same(result, bert.classifier(TEXTS[0], LABELS))


class FailingStore:
    """A label store of which every call fails, or hangs until `released`."""

    def __init__(self, *, hang: bool = False) -> None:
        self.calls = 0
        self.hang = hang
        self.released = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: Any, **__: Any) -> Any:
            self.calls += 1
            if self.hang:
                await self.released.wait()
            raise StoreError("server", "out of order")

        return fail


class TestLabelStore:
    @pytest.mark.parametrize("hang", [False, True])
    async def test_a_broken_store_fails_no_request(self, run_stack: RunStack, bert: Any, hang: bool) -> None:
        """With a store that fails, or never answers, requests are answered, the second one from memory."""
        store = FailingStore(hang=hang)
        async with run_stack(bert, store=store, label_cache={"store_budget_s": 0.01}) as stack:
            first = await stack.ask(text="card", labels=LABELS)
            assert_same(first["results"][0], bert.classifier("card", LABELS))
            second = await stack.ask(text="card", labels=LABELS)
            assert (first["usage"]["labels_cached"], second["usage"]["labels_cached"]) == (0, DESCRIPTIONS)
            assert first["results"] == second["results"]
            assert store.calls > 0
            assert (await stack.client.get("/health/ready")).status_code == 200
            store.released.set()

    async def test_no_store_at_all(self, run_stack: RunStack, bert: Any) -> None:
        """Without a store, labels are kept in memory alone."""
        async with run_stack(bert, store=None) as stack:
            await stack.ask(text="card", labels=LABELS)
            assert (await stack.ask(text="cash", labels=LABELS))["usage"]["labels_cached"] == DESCRIPTIONS

    async def test_replicas_share_a_store(self, run_stack: RunStack, bert: Any) -> None:
        """What one scorer encoded, another takes from the store, with the same numbers."""
        from deploy.label_cache import MemoryStore

        store = MemoryStore(2**20)
        body = {"text": "card", "labels": LABELS, "return_logits": True, "explain": "all"}
        async with run_stack(bert, store=store) as one:
            first = await one.ask(**body)
        async with run_stack(bert, store=store) as other:
            second = await other.ask(**body)
        assert second["usage"]["labels_cached"] == DESCRIPTIONS
        assert first["results"] == second["results"]


class TestReadiness:
    async def test_not_before_the_first_request_went_through(self, run_stack: RunStack, bert: Any) -> None:
        """Until its start has ended, an ingress answers that it is not ready, to probes and to requests."""
        async with run_stack(bert, start=False) as stack:
            for response in (
                await stack.client.get("/health/ready"),
                await stack.client.get("/v1/model"),
                await stack.post(text="card", labels=LABELS),
            ):
                assert (response.status_code, response.json()["error_type"]) == (503, "not_ready")
            assert (await stack.client.get("/health/live")).status_code == 200
            await stack.ingress.start()
            assert [batch.priority for batch in stack.encoded] == [Priority.DOCUMENTS, Priority.LABELS]
            assert (await stack.client.get("/health/ready")).json() == {"status": "ready"}

    async def test_a_start_without_an_encoder_fails(self, run_stack: RunStack, bert: Any) -> None:
        """The error of an encoder that can't be reached comes out of the start, which may be tried again."""
        async with run_stack(bert, start=False) as stack:
            own = stack.encoder

            class Gone:
                close = own.close

                async def describe(self) -> None:
                    raise ReplicaLostError("no encoder")

            stack.encoder = Gone()
            with pytest.raises(ReplicaLostError):
                await stack.ingress.start()
            with pytest.raises(NotReadyError):
                await stack.ingress.ready()
            stack.encoder = own
            await stack.ingress.start()
            stack.encoder = Gone()
            response = await stack.client.get("/health/ready")
            assert (response.status_code, response.json()["error_type"]) == (503, "not_ready")
            stack.encoder = own
            assert (await stack.client.get("/health/ready")).status_code == 200

    async def test_a_closed_ingress(self, stack: Stack) -> None:
        """After its end an ingress refuses requests as not ready, so that the proxy tries another."""
        await stack.ingress.close()
        response = await stack.post(text="card", labels=LABELS)
        assert (response.status_code, response.json()["error_type"]) == (503, "not_ready")
        query = ClassifyQuery(("card",), True, LabelSet.of(["a", "b"]), False, False, None)
        with pytest.raises(BatcherClosed):
            await stack.ingress.classify(query)

    async def test_no_secret_in_what_is_told(
        self, run_stack: RunStack, bert: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """/v1/model tells model and limits, and nothing of the label store or its secrets."""
        monkeypatch.setenv("LABEL_KEY", "known-to-the-test")
        options = {
            "url": "redis://cache.internal:6379",
            "username": "somebody",
            "password": {"env": "LABEL_KEY"},
            "signing_key": {"env": "LABEL_KEY"},
        }
        async with run_stack(bert, label_cache=options) as stack:
            response: httpx.Response = await stack.client.get("/v1/model")
            assert response.json().keys() == {
                "name",
                "fingerprint",
                "backbone",
                "max_length",
                "document_template",
                "label_template",
                "logit_scale",
                "limits",
            }
            for secret in ("known-to-the-test", "LABEL_KEY", "cache.internal", "somebody"):
                assert secret not in response.text
            assert (await stack.ask(text="card", labels=LABELS))["results"]
