"""Reranking in three dialects: the mean best cosine of the query's tokens, best document first, and what was cut."""

import json
import uuid
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from deploy.http.dialects.reranking import ranking
from tokenalign import maxsim
from tokenalign.scoring import Aligner

QUERY = "card payment"
DOCUMENTS = ["cash not received", "card payment charged twice", "was the card declined", "card payment charged twice"]
LONG = "card " * 200
PATHS = ["/rerank", "/v1/rerank", "/v2/rerank"]


def body_of(path: str, query: Any = QUERY, documents: Any = DOCUMENTS, **more: Any) -> dict[str, Any]:
    """A request in the dialect of a path."""
    return {"query": query, "texts" if path == "/rerank" else "documents": documents, **more}


def ranked(path: str, answer: Any) -> list[tuple[int, float]]:
    """Positions and scores in an answer, in its order."""
    if path == "/rerank":
        return [(rank["index"], rank["score"]) for rank in answer]
    return [(result["index"], result["relevance_score"]) for result in answer["results"]]


def mean_best_cosines(pair: Any, query: str, documents: list[str]) -> list[float]:
    """The formula by hand: unit rows of query and documents from the library, then `maxsim`."""
    classifier = pair.classifier
    aligner = Aligner(classifier.head, classifier.config.temperature)

    def rows(tokenized: Any) -> Any:
        states = classifier.backbone.encode(tokenized.tokens, max_batch_tokens=4_096)
        return tokenized.tokens.with_values(aligner.project(states, "rows"))

    queries = aligner.label_queries(rows(classifier.tokenizer.labels([query])))
    keys = aligner.document_keys(rows(classifier.tokenizer.documents(documents)))
    [found] = maxsim.maxsim(
        torch.as_tensor(np.asarray(queries.values, dtype=np.float32)),
        torch.as_tensor(np.asarray(queries.lengths, dtype=np.int64)),
        torch.as_tensor(np.asarray(keys.values, dtype=np.float32)),
        torch.as_tensor(np.asarray(keys.lengths, dtype=np.int64)),
    ).T.tolist()
    return [float(value) for value in found]


class TestScores:
    @pytest.mark.parametrize("path", PATHS)
    async def test_the_score_is_the_mean_best_cosine(self, bert_app: Any, bert: Any, path: str) -> None:
        """Each score is what `maxsim` gives for query and document, in [0, 1], and the best comes first."""
        response = await bert_app.client.post(path, json=body_of(path))
        assert response.status_code == 200, response.text
        expected = mean_best_cosines(bert, QUERY, DOCUMENTS)
        found = ranked(path, response.json())
        assert dict(found) == pytest.approx({i: min(1, max(0, value)) for i, value in enumerate(expected)}, abs=2e-3)
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
        assert sorted(i for i, _ in found) == [0, 1, 2, 3]

    async def test_raw_scores_are_the_native_logits(self, bert_app: Any) -> None:
        """Raw scores are the logits of the native route with the query as the only label."""
        native = await bert_app.ask(texts=DOCUMENTS, labels=[QUERY], return_logits=True)
        logits = {i: result["scores"][0]["logit"] for i, result in enumerate(native["results"])}
        response = await bert_app.client.post("/rerank", json=body_of("/rerank", raw_scores=True))
        assert dict(ranked("/rerank", response.json())) == logits
        scale = (await bert_app.client.get("/v1/model")).json()["logit_scale"]
        response = await bert_app.client.post("/rerank", json=body_of("/rerank"))
        assert dict(ranked("/rerank", response.json())) == pytest.approx(
            {i: min(1.0, max(0.0, logit / scale)) for i, logit in logits.items()}
        )

    def test_negative_cosines_are_zero(self) -> None:
        """A score lies within [0, 1]; the order still follows what is below 0, and ties keep the caller's order."""
        logits = [-4.0, 30.0, -2.0, 10.0, 10.0]
        results = [{"scores": [{"logit": logit}], "truncation": None} for logit in logits]
        found = ranking(results, 20.0)
        assert [document.index for document in found] == [1, 3, 4, 2, 0]
        assert [document.score for document in found] == [1.0, 0.5, 0.5, 0.0, 0.0]
        assert [document.relevance for document in found] == [1.5, 0.5, 0.5, -0.1, -0.2]

    @pytest.mark.parametrize("path", PATHS)
    async def test_equal_documents(self, bert_app: Any, path: str) -> None:
        """Documents may be equal; they score the same and keep their order."""
        found = ranked(path, (await bert_app.client.post(path, json=body_of(path))).json())
        places = [i for i, _ in found]
        assert dict(found)[1] == dict(found)[3]
        assert places.index(1) + 1 == places.index(3)


class TestTextEmbeddingsInference:
    async def test_the_text_only_when_asked(self, bert_app: Any) -> None:
        """`return_text` adds each text; without it there are index and score alone."""
        plain = (await bert_app.client.post("/rerank", json=body_of("/rerank"))).json()
        assert all(rank.keys() == {"index", "score"} for rank in plain)
        texts = (await bert_app.client.post("/rerank", json=body_of("/rerank", return_text=True))).json()
        assert [rank["text"] for rank in texts] == [DOCUMENTS[rank["index"]] for rank in texts]

    async def test_a_long_text_is_refused_unless_it_may_be_cut(self, bert_app: Any) -> None:
        """The answer could not say that a text was cut, so `truncate` must allow it."""
        sent = body_of("/rerank", documents=["card", LONG])
        response = await bert_app.client.post("/rerank", json=sent)
        assert response.status_code == 422
        assert response.json()["error"].startswith(
            "texts[1]: has 202 tokens, at most 128 are read; shorten or split it"
        )
        assert response.json()["error_type"] == "Validation"
        response = await bert_app.client.post(
            "/rerank", json={**sent, "truncate": True, "truncation_direction": "Right"}
        )
        assert len(response.json()) == 2


class TestCohereAndJina:
    async def test_the_answer_of_v2(self, bert_app: Any) -> None:
        """An id, results without documents, and a meta with version and tokens; no warnings where none are due."""
        answer = (await bert_app.client.post("/v2/rerank", json=body_of("/v2/rerank"))).json()
        assert answer.keys() == {"id", "results", "meta"}
        assert uuid.UUID(answer["id"])
        assert all(result.keys() == {"index", "relevance_score"} for result in answer["results"])
        native = await bert_app.ask(texts=DOCUMENTS, labels=[QUERY], return_logits=True)
        tokens = native["usage"]["text_tokens"]
        assert answer["meta"] == {"api_version": {"version": "2"}, "tokens": {"input_tokens": tokens}}

    async def test_the_answer_of_v1(self, bert_app: Any) -> None:
        """Jina's keys beside Cohere's: model, usage, and the documents unless they are not wanted."""
        answer = (await bert_app.client.post("/v1/rerank", json=body_of("/v1/rerank"))).json()
        assert answer.keys() == {"model", "usage", "id", "results", "meta"}
        assert answer["model"].startswith("tiny-")
        assert answer["usage"] == {"total_tokens": answer["meta"]["tokens"]["input_tokens"]}
        assert answer["meta"]["api_version"] == {"version": "1"}
        for result in answer["results"]:
            assert result["document"] == {"text": DOCUMENTS[result["index"]]}
        sent = body_of("/v1/rerank", return_documents=False)
        without = (await bert_app.client.post("/v1/rerank", json=sent)).json()
        assert all("document" not in result for result in without["results"])

    @pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
    async def test_the_first_ones_only(self, bert_app: Any, path: str) -> None:
        """`top_n` shortens the results and changes none; more than there are documents is all of them."""
        every = (await bert_app.client.post(path, json=body_of(path))).json()["results"]
        few = (await bert_app.client.post(path, json=body_of(path, top_n=2))).json()["results"]
        assert few == every[:2]
        assert (await bert_app.client.post(path, json=body_of(path, top_n=100))).json()["results"] == every

    @pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
    async def test_documents_as_objects(self, bert_app: Any, path: str) -> None:
        """A document may be an object with a text; it scores like the string."""
        objects = [{"text": text} for text in DOCUMENTS]
        plain = (await bert_app.client.post(path, json=body_of(path))).json()["results"]
        assert (await bert_app.client.post(path, json=body_of(path, documents=objects))).json()["results"] == plain

    async def test_what_was_cut_is_told(self, bert_app: Any) -> None:
        """Warnings name each document that was cut, the query, a limit that was not used, and another model's name."""
        sent = body_of("/v2/rerank", LONG, ["card", LONG, LONG], model="rerank-v3.5", max_tokens_per_doc=50, top_n=1)
        warnings = (await bert_app.client.post("/v2/rerank", json=sent)).json()["meta"]["warnings"]
        assert [warning.split(":")[0] for warning in warnings] == [
            "query",
            "documents[1]",
            "documents[2]",
            "max_tokens_per_doc",
            "model",
        ]
        assert "has 202 tokens, the first 128 were read; nothing from character" in warnings[1]
        assert "cut at 128 tokens, the model's own limit, not at 50" in warnings[3]
        sent = body_of("/v2/rerank", documents=[LONG], max_tokens_per_doc=128)
        warnings = (await bert_app.client.post("/v2/rerank", json=sent)).json()["meta"]["warnings"]
        assert [warning.split(":")[0] for warning in warnings] == ["documents[0]"]
        name = (await bert_app.client.get("/v1/model")).json()["name"]
        sent = body_of("/v2/rerank", model=name, max_tokens_per_doc=50)
        assert "warnings" not in (await bert_app.client.post("/v2/rerank", json=sent)).json()["meta"]


class TestErrors:
    @pytest.mark.parametrize("path", PATHS)
    @pytest.mark.parametrize(
        ("sent", "message"),
        [
            ({"query": None}, "query: is missing; send the query as a string"),
            ({"query": 3}, "query: must be a string, not a number"),
            ({"query": " "}, "query: is empty or only white space"),
            ({"query": "\ud800"}, "query: has a lone surrogate U+D800"),
            ({"documents": None}, "DOCUMENTS: is missing"),
            ({"documents": []}, "DOCUMENTS: is an empty list; send at least one"),
            ({"documents": "card"}, "DOCUMENTS: must be a list of"),
            ({"documents": ["a", 3]}, "DOCUMENTS[1]: must be a string"),
            ({"documents": ["a", ""]}, "DOCUMENTS[1]: is empty or only white space"),
            ({"documents": ["a"] * 5}, "DOCUMENTS: 5 texts given, at most 4 allowed (limits.max_texts)"),
            ({"documents": ["a", "b" * 201]}, "DOCUMENTS[1]: has 201 characters, at most 200 allowed"),
            ({"more": 1}, "more: is not a key of this request; it takes query"),
        ],
    )
    async def test_a_bad_request_is_told_in_its_own_words(
        self, echo: httpx.AsyncClient, service: Any, path: str, sent: dict[str, Any], message: str
    ) -> None:
        """422 with the place in this request, and the service isn't asked."""
        response = await echo.post(path, content=json.dumps(body_of(path, **{"documents": ["a"], **sent})))
        assert response.status_code == 422, response.text
        [error] = [value for key, value in response.json().items() if key in ("error", "message")]
        expected = message.replace("DOCUMENTS", "texts" if path == "/rerank" else "documents")
        if "more" in sent and path != "/rerank":
            expected = expected.replace("it takes query", "it takes model, query")
        assert error.startswith(expected)
        assert service.queries == []

    @pytest.mark.parametrize(
        ("sent", "message"),
        [
            ({"documents": ["a", {"text": ""}]}, "documents[1].text: is empty"),
            ({"documents": [{"title": "a"}]}, "documents[0].title: is not a key"),
            ({"documents": [{}]}, "documents[0].text: is missing"),
            ({"top_n": 0}, "top_n: must be at least 1; it is 0"),
            ({"top_n": True}, "top_n: must be a whole number"),
            ({"top_n": 1.5}, "top_n: must be a whole number"),
            ({"max_tokens_per_doc": "4"}, "max_tokens_per_doc: must be a whole number"),
            ({"max_chunks_per_doc": 10}, "max_chunks_per_doc: must be 1"),
            ({"rank_fields": ["title"]}, 'rank_fields: must be ["text"]'),
            ({"return_documents": 1}, "return_documents: must be true or false"),
            ({"model": 3}, "model: must be a string"),
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
    async def test_of_cohere_and_jina(
        self, echo: httpx.AsyncClient, path: str, sent: dict[str, Any], message: str
    ) -> None:
        """Their own keys are checked too, and errors are {"message"}."""
        response = await echo.post(path, json=body_of(path, **{"documents": ["a"], **sent}))
        assert response.status_code == 422, response.text
        assert response.json().keys() == {"message"}
        assert response.json()["message"].startswith(message)

    async def test_truncation_at_the_other_end(self, echo: httpx.AsyncClient) -> None:
        """Texts are not cut at their beginning, so this is refused."""
        response = await echo.post("/rerank", json=body_of("/rerank", documents=["a"], truncation_direction="left"))
        assert response.status_code == 422
        assert response.json()["error"].startswith("truncation_direction: must be right")


@pytest.mark.parametrize("path", PATHS)
async def test_the_query_stays_out_of_the_store(echo: httpx.AsyncClient, service: Any, path: str) -> None:
    """A query is asked once, so its rows are not kept."""
    assert (await echo.post(path, json=body_of(path))).status_code == 200
    [query] = service.queries
    assert query.labels.names == (QUERY,)
    assert query.keep_labels is False


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_the_model_that_is_named_is_asked(echo: httpx.AsyncClient, service: Any, path: str) -> None:
    """A head that is served is asked by its name; for another name the default one answers, and a warning says so."""
    answer = (await echo.post(path, json=body_of(path, model="team/other"))).json()
    assert service.queries[-1].model == "team/other"
    assert "warnings" not in answer["meta"]
    answer = (await echo.post(path, json=body_of(path, model="rerank-v3.5"))).json()
    assert service.queries[-1].model is None
    assert answer["meta"]["warnings"] == [
        "model: echo answered, since none of that name is served; there is echo, team/other"
    ]
