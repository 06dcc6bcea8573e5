"""`POST /predict` of text-embeddings-inference: the configured label set, texts in that API's forms, native scores."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.label_sets import Definition
from deploy.settings import Settings
from tokenalign import LabelSet
from tokenalign.errors import ConfigError

LABELS = ["card payment", "cash declined", "not received"]
TEXT, OTHER = "card payment was charged twice", "cash not received"
LONG = "card " * 200


async def native(stack: Any, key: str, *texts: str) -> list[list[dict[str, Any]]]:
    """The native answer in this dialect's form; key: score or logit."""
    answer = await stack.ask(texts=list(texts), labels=LABELS, return_logits=True)
    return [[{"score": s[key], "label": s["label"]} for s in result["scores"]] for result in answer["results"]]


class TestScores:
    @pytest.mark.parametrize("inputs", [TEXT, [TEXT]])
    async def test_one_text(self, bert_app: Any, inputs: Any) -> None:
        """A string, or a list of one, gives one list of the set's labels, best first, with the native scores."""
        response = await bert_app.client.post("/predict", json={"inputs": inputs})
        assert response.status_code == 200, response.text
        assert response.json() == (await native(bert_app, "score", TEXT))[0]

    async def test_a_batch(self, bert_app: Any) -> None:
        """Lists of one string each give a list for each, in order; also where the batch has one."""
        response = await bert_app.client.post("/predict", json={"inputs": [[TEXT], [OTHER]]})
        assert response.json() == await native(bert_app, "score", TEXT, OTHER)
        response = await bert_app.client.post("/predict", json={"inputs": [[TEXT]]})
        assert response.json() == await native(bert_app, "score", TEXT)

    async def test_raw_scores(self, bert_app: Any) -> None:
        """Raw scores are the calibrated logits."""
        response = await bert_app.client.post("/predict", json={"inputs": TEXT, "raw_scores": True})
        assert response.json() == (await native(bert_app, "logit", TEXT))[0]

    @pytest.mark.parametrize(
        ("inputs", "place"), [(LONG, "inputs"), ([LONG], "inputs[0]"), ([["a"], [LONG]], "inputs[1][0]")]
    )
    async def test_a_long_text(self, bert_app: Any, inputs: Any, place: str) -> None:
        """A text that would be cut is refused, unless the request allows it."""
        response = await bert_app.client.post("/predict", json={"inputs": inputs})
        assert response.status_code == 422
        assert response.json()["error"].startswith(f"{place}: has 202 tokens, at most 128 are read; shorten or split")
        response = await bert_app.client.post("/predict", json={"inputs": inputs, "truncate": True})
        assert response.status_code == 200


class TestConfiguration:
    async def test_without_a_label_set(self, echo: httpx.AsyncClient) -> None:
        """404 that says how a label set is configured."""
        response = await echo.post("/predict", json={"inputs": "a"})
        assert response.status_code == 404
        assert response.json().keys() == {"error", "error_type"}
        assert "set dialects.predict_label_set to the id of a label set" in response.json()["error"]

    async def test_by_its_id(self, echo: httpx.AsyncClient, service: Any) -> None:
        """An id of the settings is asked of the store at each request; one that is gone is a 404 that says so."""
        service.predicted = Definition.of(LabelSet.of(["first", "second"]), None).set_id
        answer = (await echo.post("/predict", json={"inputs": "a"})).json()
        assert {score["label"] for score in answer} == {"first", "second"}
        service.predicted = "0" * 32
        response = await echo.post("/predict", json={"inputs": "a"})
        assert response.status_code == 404
        assert response.json()["error"].startswith(f"no label set has the id '{'0' * 32}'")

    def test_a_name_must_be_listed(self, tmp_path: Path) -> None:
        """Settings that name a set which is nowhere are refused at the start, not at the first request."""
        warm = {"warm": [{"file": str(tmp_path / "labels.txt"), "name": "mine"}]}
        for good in ("mine", "0123456789abcdef" * 2):
            Settings.parse({"label_sets": warm, "dialects": {"predict_label_set": good}})
        for bad in ("other", "0123456789ABCDEF" * 2, "0" * 31):
            with pytest.raises(ConfigError, match=r"dialects\.predict_label_set: is neither the id"):
                Settings.parse({"label_sets": warm, "dialects": {"predict_label_set": bad}})


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({}, "inputs: is missing"),
        ({"inputs": 3}, "inputs: must be a list of lists of one string, or one string, not a number"),
        ({"inputs": []}, "inputs: is an empty list"),
        ({"inputs": ""}, "inputs: is empty or only white space"),
        ({"inputs": [""]}, "inputs[0]: is empty or only white space"),
        ({"inputs": ["a", "b"]}, "inputs: has 2 strings: a list of two is a pair, and pairs are not scored"),
        ({"inputs": [["a"], ["b", "c"]]}, "inputs[1]: has 2 strings"),
        ({"inputs": [["a"], []]}, "inputs[1]: is an empty list"),
        ({"inputs": [["a"], "b"]}, "inputs[1]: must be a list of strings, not a string"),
        ({"inputs": [["a"], [3]]}, "inputs[1][0]: must be a string"),
        ({"inputs": [["a"], [" "]]}, "inputs[1][0]: is empty or only white space"),
        ({"inputs": [["a"]] * 5}, "inputs: 5 texts given, at most 4 allowed (limits.max_texts)"),
        ({"inputs": "a", "raw_scores": "yes"}, "raw_scores: must be true or false"),
        ({"inputs": "a", "truncate": 1}, "truncate: must be true or false"),
        ({"inputs": "a", "truncation_direction": "left"}, "truncation_direction: must be right"),
        ({"inputs": "a", "labels": ["b"]}, "labels: is not a key of this request; it takes inputs, truncate"),
    ],
)
async def test_a_bad_request_is_told_in_its_own_words(
    echo: httpx.AsyncClient, service: Any, sent: dict[str, Any], message: str
) -> None:
    """422 as {"error", "error_type"}, with the place in this request, and the service isn't asked."""
    service.predicted = Definition.of(LabelSet.of(["first", "second"]), None).set_id
    response = await echo.post("/predict", json=sent)
    assert response.status_code == 422, response.text
    assert response.json()["error"].startswith(message)
    assert response.json()["error_type"] == "Validation"
    assert service.queries == []
