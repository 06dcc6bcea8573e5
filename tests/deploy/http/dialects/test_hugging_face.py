"""Zero-shot classification as Hugging Face clients ask for it: native scores, in the form that each client reads."""

import json
from typing import Any

import httpx
import pytest

from deploy.http.dialects.hugging_face import translate, with_labels_and_scores
from tokenalign.errors import InputError

PATH = "/hf/zero-shot-classification"
TEXTS = ["card payment was charged twice", "cash not received"]
LABELS = ["card payment", "cash declined", "not received, yet"]
OLD = {"user-agent": "unknown/None; hf_hub/0.36.2; python/3.11.2"}
NEW = {"user-agent": "unknown/None; hf_hub/1.1.5; python/3.11.2"}


def body(inputs: Any = TEXTS[0], **parameters: Any) -> dict[str, Any]:
    return {"inputs": inputs, "parameters": {"candidate_labels": LABELS, **parameters}}


async def native_scores(stack: Any, texts: list[str], **options: Any) -> list[list[dict[str, Any]]]:
    """The scores that the native route gives."""
    answer = await stack.ask(texts=texts, labels=LABELS, **options)
    return [result["scores"] for result in answer["results"]]


class TestScores:
    async def test_a_text(self, bert_app: Any) -> None:
        """One text gives one list, best label first, and its scores are the native ones to the last digit."""
        response = await bert_app.client.post(PATH, json=body())
        assert response.status_code == 200, response.text
        assert response.json() == (await native_scores(bert_app, [TEXTS[0]]))[0]

    async def test_texts(self, bert_app: Any) -> None:
        """A list of texts gives a list of lists in their order, also where there is one text in it."""
        for texts in (TEXTS, TEXTS[:1]):
            response = await bert_app.client.post(PATH, json=body(texts))
            assert response.json() == await native_scores(bert_app, texts)

    async def test_the_older_form(self, bert_app: Any) -> None:
        """huggingface_hub before 1.1.5 gets the same numbers as labels and scores, with the text."""
        [scores] = await native_scores(bert_app, [TEXTS[0]])
        expected = {
            "sequence": TEXTS[0],
            "labels": [score["label"] for score in scores],
            "scores": [score["score"] for score in scores],
        }
        assert (await bert_app.client.post(PATH, json=body(), headers=OLD)).json() == expected
        assert (await bert_app.client.post(PATH, json=body([TEXTS[0]]), headers=OLD)).json() == [expected]
        assert (await bert_app.client.post(PATH, json=body(), headers=NEW)).json() == scores

    async def test_a_template(self, bert_app: Any) -> None:
        """A hypothesis template is the native label template, so it changes scores as that one does."""
        response = await bert_app.client.post(PATH, json=body(hypothesis_template="this is {}, twice"))
        assert response.status_code == 200, response.text
        assert (
            response.json() == (await native_scores(bert_app, [TEXTS[0]], label_template="this is {label}, twice"))[0]
        )
        assert response.json() != (await native_scores(bert_app, [TEXTS[0]]))[0]

    async def test_multi_label_is_the_native_one(self, bert_app: Any) -> None:
        """A model without a calibration refuses independent scores here as there."""
        response = await bert_app.client.post(PATH, json=body(multi_label=True))
        native = await bert_app.post(text=TEXTS[0], labels=LABELS, multi_label=True)
        assert response.status_code == native.status_code == 422
        assert response.json()["error"] == "parameters." + native.json()["error"]


@pytest.mark.parametrize(
    ("user_agent", "older"),
    [
        ("unknown/None; hf_hub/0.36.2; python/3.11.2; torch/2.13.0", True),
        ("unknown/None; hf_hub/1.1.4; python/3.11.2", True),
        ("unknown/None; hf_hub/1.1.5; python/3.11.2", False),
        ("unknown/None; hf_hub/1.10.0; python/3.11.2", False),
        ("unknown/None; hf_hub/2.4.0", False),
        ("hf_hub/1.1.0rc0", True),
        ("hf_hub/1.2", False),
        ("hf_hub/1.1", True),
        ("@huggingface/inference/4.13.30 Node.js/20", False),
        ("curl/8.5.0", False),
        ("", False),
        ("hf_hub/99999999999999999999", False),
    ],
)
def test_the_form_follows_the_version(user_agent: str, older: bool) -> None:
    """Only a huggingface_hub that says a version before 1.1.5 gets the older form."""
    assert with_labels_and_scores(user_agent) is older


class TestTranslation:
    def test_a_label_with_commas(self) -> None:
        """In a list, a label with commas is one label; in a string, a comma parts labels."""
        assert translate(body(candidate_labels=["a, b", "c"])).body["labels"] == ["a, b", "c"]
        assert translate(body(candidate_labels="a, b ,c,")).body["labels"] == ["a", "b", "c"]

    def test_null_is_absent(self) -> None:
        """Options that are null, as some clients send them, count as left out."""
        native = translate(body(multi_label=None, hypothesis_template=None) | {"options": None}).body
        assert native == {"text": TEXTS[0], "labels": LABELS}

    @pytest.mark.parametrize("template", ["no place", "{} and {}", "{label}", ""])
    def test_a_template_needs_one_place(self, template: str) -> None:
        """A template without {}, or with several, is refused."""
        with pytest.raises(InputError, match=r"must hold \{\} exactly once") as caught:
            translate(body(hypothesis_template=template))
        assert caught.value.loc == ("parameters", "hypothesis_template")


class TestErrors:
    @pytest.mark.parametrize(
        ("sent", "message"),
        [
            ({}, "inputs: is missing"),
            ({"inputs": "a"}, "parameters: is missing"),
            ({"inputs": "a", "parameters": {}}, "parameters.candidate_labels: is missing"),
            ({"inputs": "a", "parameters": []}, "parameters: must be an object, not an array"),
            (body(3), "inputs: must be a string or a list of strings, not a number"),
            (body(""), "inputs: is empty or only white space"),
            (body(["a", " "]), "inputs[1]: is empty or only white space"),
            (body(["a", {}]), "inputs[1]: must be a string, not an object"),
            (body([]), "inputs: is an empty list"),
            (body(["a"] * 5), "inputs: 5 texts given, at most 4 allowed (limits.max_texts)"),
            (body(candidate_labels=["a"]), "parameters.candidate_labels: 1 label given, at least 2 needed"),
            (body(candidate_labels="a"), "parameters.candidate_labels: 1 label given, at least 2 needed"),
            (
                body(candidate_labels=["a", "b", "a"]),
                "parameters.candidate_labels[2]: 'a' is the same label as number 0",
            ),
            (body(candidate_labels=["a", 1]), "parameters.candidate_labels[1]: must be a string, not a number"),
            (body(candidate_labels={"a": 1}), "parameters.candidate_labels: must be a string or a list of strings"),
            (body(multi_label="yes"), "parameters.multi_label: must be true or false"),
            (body(hypothesis_template=1), "parameters.hypothesis_template: must be a string, not a number"),
            (body(more=1), "parameters.more: is not a key of this request; it takes candidate_labels, multi_label"),
            (body() | {"more": 1}, "more: is not a key of this request; it takes inputs, parameters, options"),
            (body(candidate_labels=["a", "\ud800"]), "parameters.candidate_labels[1]: has a lone surrogate U+D800"),
        ],
    )
    async def test_a_bad_request_is_told_in_its_own_words(
        self, echo: httpx.AsyncClient, service: Any, sent: Any, message: str
    ) -> None:
        """422 as {"error"}, with the place in this request, and the service isn't asked."""
        response = await echo.post(PATH, content=json.dumps(sent))
        assert response.status_code == 422, response.text
        assert response.json().keys() == {"error"}
        assert response.json()["error"].startswith(message)
        assert service.queries == []
