"""The open inference protocol: health, metadata, and inference with tensors of strings, as JSON and in binary."""

import asyncio
import json
import struct
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.http.dialects.tensors import HEADER_LENGTH
from deploy.http.errors import NotReadyError
from deploy.http.routes import build_http_app
from deploy.settings import LimitSettings

LIMITS = LimitSettings(max_texts=4, max_labels=6, max_text_chars=200, max_body_bytes=8_192)

TEXTS = ["card payment was charged twice", "cash not received"]
LABELS = ["not received", "card payment", "cash declined"]
ROWS = [["card payment", "not received"], ["cash", "not declined"]]


def tensor(name: str, data: Any, shape: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape or [len(data)], "datatype": "BYTES", "data": data, **more}


def body(text: Any = None, labels: Any = None, **more: Any) -> dict[str, Any]:
    return {"inputs": [text or tensor("text", TEXTS), labels or tensor("labels", LABELS)], **more}


def packed(*values: str | bytes) -> bytes:
    """Strings as the binary extension has them."""
    data = [value.encode() if isinstance(value, str) else value for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in data)


def binary(name: str, data: bytes, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}


async def post_binary(client: httpx.AsyncClient, path: str, head: dict[str, Any], tail: bytes) -> httpx.Response:
    content = json.dumps(head).encode()
    return await client.post(path, content=content + tail, headers={HEADER_LENGTH: str(len(content))})


def outputs_of(response: httpx.Response) -> dict[str, Any]:
    """The outputs of an answer by name."""
    assert response.status_code == 200, response.text
    return {output["name"]: output for output in response.json()["outputs"]}


@pytest.fixture
def path(bert: Any) -> str:
    """Where the tiny BERT infers."""
    return f"/v2/models/{bert.classifier.config.name}/infer"


async def native(stack: Any, labels: Any, **options: Any) -> tuple[list[str], list[float]]:
    """The native best labels, and scores in the order of the labels."""
    answer = await stack.ask(texts=TEXTS, labels=labels, **options)
    found: list[float] = []
    for i, result in enumerate(answer["results"]):
        by_name = {score["label"]: score["score"] for score in result["scores"]}
        found += [by_name[name] for name in (labels[i] if isinstance(labels[0], list) else labels)]
    return [result["label"] for result in answer["results"]], found


class TestInference:
    async def test_scores_are_the_native_ones(self, bert_app: Any, path: str) -> None:
        """Labels and scores are the native ones, scores in the caller's order of labels; the id comes back."""
        response = await bert_app.client.post(path, json=body(id="42"))
        best, scores = await native(bert_app, LABELS)
        assert response.json() == {
            "model_name": path.split("/")[3],
            "id": "42",
            "outputs": [
                {"name": "label", "datatype": "BYTES", "shape": [2], "data": best},
                {"name": "scores", "datatype": "FP32", "shape": [2, 3], "data": scores},
                {"name": "labels", "datatype": "BYTES", "shape": [3], "data": LABELS},
            ],
        }

    @pytest.mark.parametrize("data", [ROWS, [name for row in ROWS for name in row]])
    async def test_labels_for_each_text(self, bert_app: Any, path: str, data: Any) -> None:
        """Labels of shape [n, k], flat or row by row, are other candidates for each text."""
        response = await bert_app.client.post(path, json=body(labels=tensor("labels", data, [2, 2])))
        best, scores = await native(bert_app, ROWS)
        outputs = outputs_of(response)
        assert outputs["label"]["data"] == best
        assert (outputs["scores"]["shape"], outputs["scores"]["data"]) == ([2, 2], scores)
        assert (outputs["labels"]["shape"], outputs["labels"]["data"]) == ([2, 2], [n for row in ROWS for n in row])

    @pytest.mark.parametrize("data", [TEXTS, [[text] for text in TEXTS]])
    async def test_texts_in_a_column(self, bert_app: Any, path: str, data: Any) -> None:
        """Texts of shape [n, 1], as batching servers have them, are n texts."""
        response = await bert_app.client.post(path, json=body(tensor("text", data, [2, 1])))
        assert outputs_of(response)["label"]["data"] == (await native(bert_app, LABELS))[0]

    async def test_some_outputs(self, bert_app: Any, path: str) -> None:
        """Only the outputs that are asked for, in the order asked; without an id there is none in the answer."""
        response = await bert_app.client.post(path, json=body(outputs=[{"name": "scores"}, {"name": "label"}]))
        assert list(outputs_of(response)) == ["scores", "label"]
        assert "id" not in response.json()

    async def test_options_are_parameters(self, bert_app: Any, path: str) -> None:
        """Options of the native route are parameters of the request; no label is an empty string."""
        options = {"label_template": "this is {label}, twice", "long_text": "window", "window_stride": 9}
        response = await bert_app.client.post(path, json=body(parameters=options))
        assert outputs_of(response)["scores"]["data"] == (await native(bert_app, LABELS, **options))[1]
        response = await bert_app.client.post(path, json=body(parameters={"min_score": 1.0}))
        assert outputs_of(response)["label"]["data"] == ["", ""]
        response = await bert_app.client.post(path, json=body(parameters={"min_score": 2}))
        assert response.status_code == 422
        assert response.json()["error"].startswith("parameters.min_score: ")


class TestBinary:
    async def test_in_and_out(self, bert_app: Any, path: str) -> None:
        """Strings and numbers travel in binary both ways, with the numbers of the JSON form as FP32."""
        texts, labels = packed(*TEXTS), packed(*LABELS)
        head = {
            "inputs": [binary("text", texts, [2]), binary("labels", labels, [3])],
            "parameters": {"binary_data_output": True},
        }
        response = await post_binary(bert_app.client, path, head, texts + labels)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/octet-stream"
        size = int(response.headers[HEADER_LENGTH])
        answer, tail = json.loads(response.content[:size]), response.content[size:]
        best, scores = await native(bert_app, LABELS)
        numbers = b"".join(struct.pack("<f", score) for score in scores)
        expected = {"label": packed(*best), "scores": numbers, "labels": packed(*LABELS)}
        assert [output["name"] for output in answer["outputs"]] == list(expected)
        assert [output["parameters"]["binary_data_size"] for output in answer["outputs"]] == [
            len(data) for data in expected.values()
        ]
        assert all("data" not in output for output in answer["outputs"])
        assert tail == b"".join(expected.values())

    async def test_an_output_follows_the_request(self, bert_app: Any, path: str) -> None:
        """What the request says of all outputs holds for one that is asked for without saying."""
        said = [{"name": "scores"}, {"name": "label", "parameters": {"binary_data": False}}]
        sent = body(outputs=said, parameters={"binary_data_output": True})
        response = await bert_app.client.post(path, json=sent)
        answer = json.loads(response.content[: int(response.headers[HEADER_LENGTH])])
        best, scores = await native(bert_app, LABELS)
        assert answer["outputs"][0]["parameters"] == {"binary_data_size": 4 * len(scores)}
        assert answer["outputs"][1]["data"] == best

    async def test_one_input_and_one_output(self, bert_app: Any, path: str) -> None:
        """Each tensor is in binary or not by itself."""
        labels = packed(*LABELS)
        head = {
            "inputs": [tensor("text", TEXTS), binary("labels", labels, [3])],
            "outputs": [{"name": "label"}, {"name": "scores", "parameters": {"binary_data": True}}],
        }
        response = await post_binary(bert_app.client, path, head, labels)
        answer = json.loads(response.content[: int(response.headers[HEADER_LENGTH])])
        best, scores = await native(bert_app, LABELS)
        assert answer["outputs"][0]["data"] == best
        assert response.content.endswith(struct.pack("<6f", *scores))

    @pytest.mark.parametrize(
        ("tail", "size", "message"),
        [
            (packed("a", "b"), 9, "inputs[1].data: has 1 strings, its shape [2] says 2"),
            (packed("a"), 100, "inputs[1].parameters.binary_data_size: is 100, but 5 bytes are left behind the JSON"),
            (packed("a"), -1, "inputs[1].parameters.binary_data_size: must not be negative"),
            (packed("a", "b"), True, "inputs[1].parameters.binary_data_size: must be a whole number"),
            (packed("a", "b") + b"c", 10, "inputs: 1 bytes behind the JSON belong to no input"),
            (b"\x01\x00", 2, "inputs[1].data[0]: ends within the length of a string"),
            (b"\x03\x00\x00\x00ab", 6, "inputs[1].data[0]: is longer than binary_data_size allows"),
            (b"\xff\xff\xff\xffab", 6, "inputs[1].data[0]: is longer than binary_data_size allows"),
            (packed("a", b"\xff"), 10, "inputs[1].data[1]: is no UTF-8: invalid start byte at byte 0"),
            (b"", 0, "inputs[1].data: has 0 strings, its shape [2] says 2"),
        ],
    )
    async def test_bytes_that_do_not_fit(self, echo: httpx.AsyncClient, tail: bytes, size: Any, message: str) -> None:
        """Sizes, lengths and characters are checked, and the tensor is named."""
        labels = {"name": "labels", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
        if message.startswith("inputs[1].data: has 1"):
            tail = packed("abcde")
        response = await post_binary(echo, "/v2/models/echo/infer", body(labels=labels), tail)
        assert response.status_code == 422, response.text
        assert response.json()["error"].startswith(message)

    def test_any_bytes(self, service: Any) -> None:
        """Whatever stands behind the JSON, and whatever its size is said to be: an answer or a 422."""
        app = build_http_app(service, LIMITS)

        async def post(sizes: tuple[int, int], tail: bytes) -> httpx.Response:
            inputs = [binary(name, b"", [2]) for name in ("text", "labels")]
            for tensor, size in zip(inputs, sizes, strict=True):
                tensor["parameters"]["binary_data_size"] = size
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                return await post_binary(client, "/v2/models/echo/infer", {"inputs": inputs}, tail)

        strings = st.lists(st.binary(max_size=4), max_size=3).map(lambda values: packed(*values))
        tails = st.binary(max_size=24) | strings

        @given(tails, tails, st.integers(-2, 2), st.integers(-2, 2))
        def check(text: bytes, labels: bytes, more: int, less: int) -> None:
            response = asyncio.run(post((len(text) + more, len(labels) + less), text + labels))
            assert response.status_code in (200, 422), response.text

        check()

    @pytest.mark.parametrize("length", ["-1", "x", "1e3", "99999999", "²", "9" * 5_000])
    async def test_a_length_of_the_json_that_is_none(self, echo: httpx.AsyncClient, length: str) -> None:
        """A header that gives no usable length is a 422 that names it."""
        headers = {HEADER_LENGTH.encode(): length.encode("latin-1")}
        response = await echo.post("/v2/models/echo/infer", content=json.dumps(body()), headers=headers)
        assert response.status_code == 422
        assert response.json()["error"].startswith(HEADER_LENGTH)


class TestErrors:
    @pytest.mark.parametrize(
        ("sent", "message"),
        [
            ({}, "inputs: is missing"),
            ({"inputs": {}}, "inputs: must be a list of inputs text and labels, not an object"),
            ({"inputs": [tensor("text", TEXTS)]}, "inputs: has no input labels; the inputs are text and labels"),
            ({"inputs": [tensor("text", ["a"])] * 2}, "inputs[1].name: text is given twice"),
            (body(tensor("tekst", ["a"])), "inputs[0].name: is none of text, labels"),
            (body(tensor("text", ["a"], datatype="FP32")), "inputs[0].datatype: must be BYTES"),
            (body(tensor("text", ["a"], datatype=[])), "inputs[0].datatype: must be BYTES"),
            (body(tensor("text", ["a"], [2])), "inputs[0].data: has 1 strings, its shape [2] says 2"),
            (body(tensor("text", ["a"], [10**9, 10**9])), "inputs[0].data: has 1 strings, its shape"),
            (body(tensor("text", ["a"], [1, 1, 1])), "inputs[0].shape: has 3 dimensions, at most 2 allowed"),
            (body(tensor("text", ["a"], [0])), "inputs[0].shape[0]: must be a whole number from 1"),
            (body(tensor("text", ["a"], [10**4_000])), "inputs[0].shape[0]: must be a whole number from 1"),
            (body(tensor("text", ["a"], [True])), "inputs[0].shape[0]: must be a whole number from 1"),
            (body(tensor("text", ["a", "b"], [1, 2])), "inputs[0].shape: must be [n] or [n, 1]; it is [1, 2]"),
            (body(tensor("text", "a", [1])), "inputs[0].data: must be a list of strings, not a string"),
            (body(tensor("text", ["a", 3])), "inputs[0].data[1]: must be a string, not a number"),
            (body(tensor("text", ["a", [3]])), "inputs[0].data[1]: must be a string, not an array"),
            (body(tensor("text", ["a", " "])), "inputs[0].data[1]: is empty or only white space"),
            (body(tensor("text", [["a"], [" "]], [2, 1])), "inputs[0].data[1][0]: is empty or only white space"),
            (body(tensor("text", ["a"] * 5)), "inputs[0]: 5 texts given, at most 4 allowed"),
            (body(labels=tensor("labels", ["a"])), "inputs[1]: 1 label given, at least 2 needed"),
            (body(labels=tensor("labels", ["a", "b", "a"])), "inputs[1].data[2]: 'a' is the same label as number 0"),
            (
                body(labels=tensor("labels", ["a", "b"], [1, 2])),
                "inputs[1].shape: has labels for 1 texts, but there are 2",
            ),
            (
                body(labels=tensor("labels", [["a", "b"], ["c"]], [2, 2])),
                "inputs[1].data[1]: has 1 strings, the shape says 2",
            ),
            (body(labels=tensor("labels", ["a", "b", "c", "c"], [2, 2])), "inputs[1].data[3]: 'c' is the same label"),
            (
                body(labels=tensor("labels", [["a", "b"], ["c", ""]], [2, 2])),
                "inputs[1].data[1][1]: is empty or only white space",
            ),
            (body(tensor("text", ["a"], parameters={"binary_data_size": 1})), "inputs[0].data: is given as well as"),
            (body(outputs=[{"name": "logits"}]), "outputs[0].name: is none of label, scores, labels"),
            (body(outputs=[{"name": "label"}] * 2), "outputs[1].name: label is given twice"),
            (body(outputs=[]), "outputs: is an empty list"),
            (
                body(outputs=[{"name": "label", "parameters": {"classification": 1}}]),
                "outputs[0].parameters.classification",
            ),
            (body(id=42), "id: must be a string"),
            (body(id="\ud800"), "id: has a lone surrogate"),
            (
                body(parameters={"explain": True}),
                "parameters.explain: is not a key of this request; it takes multi_label",
            ),
            (body(parameters={"long_text": "most"}), "parameters.long_text: must be"),
            (body(more=1), "more: is not a key of this request; it takes id, parameters, inputs, outputs"),
        ],
    )
    async def test_a_bad_request_is_told_in_its_own_words(
        self, echo: httpx.AsyncClient, service: Any, sent: Any, message: str
    ) -> None:
        """422 as {"error"}, with the place in this request, and the service isn't asked."""
        response = await echo.post("/v2/models/echo/infer", content=json.dumps(sent))
        assert response.status_code == 422, response.text
        assert response.json().keys() == {"error"}
        assert response.json()["error"].startswith(message)
        assert service.queries == []

    @pytest.mark.parametrize("name", ["other", "a/b", "%F0%9F%98%80", "ECHO", "echo/versions/1"])
    async def test_an_unknown_model(self, echo: httpx.AsyncClient, name: str) -> None:
        """404 with the name of the model that there is, on each route of a model."""
        for method, end in (("GET", ""), ("GET", "/ready"), ("POST", "/infer")):
            response = await echo.request(method, f"/v2/models/{name}{end}")
            assert response.status_code == 404, response.text
            assert response.json().keys() == {"error"}
            assert response.json()["error"].endswith("is served here; there is echo, team/other")


async def test_the_model_of_the_path_is_asked(echo: httpx.AsyncClient, service: Any) -> None:
    """Each head has paths of its own, also one whose name has a slash in it."""
    for name in ("echo", "team/other"):
        response = await echo.post(f"/v2/models/{name}/infer", json=body())
        assert response.json()["model_name"] == service.queries[-1].model == name
        assert (await echo.get(f"/v2/models/{name}")).json()["name"] == name
        assert (await echo.get(f"/v2/models/{name}/ready")).json()["name"] == name


class TestMetadata:
    async def test_of_the_server(self, echo: httpx.AsyncClient) -> None:
        """Name, version and the one extension, with and without a slash behind."""
        for path in ("/v2", "/v2/"):
            answer = (await echo.get(path, follow_redirects=True)).json()
            assert answer.keys() == {"name", "version", "extensions"}
            assert (answer["name"], answer["extensions"]) == ("tokenalign", ["binary_tensor_data"])

    async def test_of_the_model(self, bert_app: Any, path: str) -> None:
        """The inputs and outputs that are named are those that inference takes and gives."""
        answer = (await bert_app.client.get(path.removesuffix("/infer"))).json()
        assert answer["name"] == path.split("/")[3]
        assert [(t["name"], t["datatype"]) for t in answer["inputs"]] == [("text", "BYTES"), ("labels", "BYTES")]
        given = (await bert_app.client.post(path, json=body())).json()["outputs"]
        for declared, output in zip(answer["outputs"], given, strict=True):
            assert (declared["name"], declared["datatype"]) == (output["name"], output["datatype"])
            assert len(declared["shape"]) == len(output["shape"])

    async def test_health(self, echo: httpx.AsyncClient, service: Any) -> None:
        """Live is live; ready follows the service, of the server and of the model."""
        ready = ("/v2/health/ready", "/v2/models/echo/ready")
        assert (await echo.get("/v2/health/live")).json() == {"live": True}
        assert (await echo.get(ready[0])).json() == {"ready": True}
        assert (await echo.get(ready[1])).json() == {"name": "echo", "ready": True}
        service.failure = NotReadyError("the service is starting; ask again in a moment")
        assert (await echo.get("/v2/health/live")).status_code == 200
        for path in ready:
            response = await echo.get(path)
            assert response.status_code == 503
            assert response.json() == {"error": "the service is starting; ask again in a moment"}
