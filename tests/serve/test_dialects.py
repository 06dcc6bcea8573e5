"""The dialects with the clients that speak them, in the versions named here, against the application as it ships."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLIENTS = ("huggingface_hub==0.36.2", "cohere==7.3.1", "tritonclient[http]==2.73.0")
JAVASCRIPT_CLIENT = "@huggingface/inference@4.13.30"

TEXT = "I was charged twice for the same card purchase."
LABELS = ["duplicate card payment", "cash withdrawal declined", "card not received, still"]
DOCUMENTS = ["Where is my card?", TEXT, "The machine would not give me any money."]
LONG = "Where is my card? " * 60

Run = Callable[[str], Any]


def run(command: list[str], url: str, **environment: str) -> Any:
    """What a program prints as JSON; it finds the application's address, text and labels in its environment."""
    known = {"URL": url, "TEXT": TEXT, "LABELS": json.dumps(LABELS), "DOCUMENTS": json.dumps(DOCUMENTS), "LONG": LONG}
    here = os.environ | known | {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "none"} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=here, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def absent(reason: str) -> None:
    """Skips what needs a client that can't be had, but fails where CI must not skip it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def install(folder: Path, *commands: list[str]) -> None:
    """Makes a folder by commands, unless an earlier run did; skips when they fail, since they need a package index."""
    done = folder / "done"
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in commands:
        ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
        if ended.returncode != 0:
            absent(f"clients could not be installed: {ended.stderr.strip()[-300:]}")
    done.touch()


@pytest.fixture(scope="session")
def clients_python(request: pytest.FixtureRequest) -> str:
    """A Python that has the clients which don't fit beside what is served: older ones, or with many packages."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("clients") / re.sub(r"\W+", "-", "-".join(CLIENTS))
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *CLIENTS]
    install(folder, [sys.executable, "-m", "venv", str(folder)], pip)
    return python


@pytest.fixture(scope="session")
def javascript(request: pytest.FixtureRequest) -> Path:
    """A folder where Node finds the JavaScript client."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("Node.js is not installed, and nothing else of the project needs it")
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("clients") / re.sub(r"\W+", "-", JAVASCRIPT_CLIENT)
    install(folder, ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), JAVASCRIPT_CLIENT])
    return folder


@pytest.fixture(scope="module")
def url(default_app: Any) -> str:
    """The address of the application as it ships."""
    address: str = default_app.url
    return address


@pytest.fixture(scope="module")
def native(url: str) -> Callable[..., list[dict[str, Any]]]:
    """Asks the native route; gives its results."""

    def ask(**body: Any) -> list[dict[str, Any]]:
        answer = httpx.post(f"{url}/v1/classify", json=body, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    return ask


@pytest.fixture(scope="module")
def expected(url: str, native: Any) -> list[list[Any]]:
    """Position and score of each document, best first, from the native logits."""
    scale = httpx.get(f"{url}/v1/model", trust_env=False).json()["logit_scale"]
    results = native(texts=DOCUMENTS, labels=["card not received"], return_logits=True)
    scores = [[i, result["scores"][0]["logit"] / scale] for i, result in enumerate(results)]
    return sorted(scores, key=lambda score: -score[1])


HUGGING_FACE = """
import json, os
from huggingface_hub import InferenceClient, __version__
client = InferenceClient(model=os.environ["URL"] + "/hf/zero-shot-classification")
labels = json.loads(os.environ["LABELS"])
found = {
    name: [[e.label, e.score] for e in client.zero_shot_classification(os.environ["TEXT"], labels, **options)]
    for name, options in {
        "plain": {}, "several": {"multi_label": True}, "template": {"hypothesis_template": "A customer asks for {}."},
    }.items()
}
try:
    client.zero_shot_classification(os.environ["TEXT"], ["a", "a"])
except Exception as error:
    found["error"] = str(error)
print(json.dumps({"version": __version__, **found}))
"""

JAVASCRIPT = """
import { InferenceClient } from "@huggingface/inference";
const { URL: url, TEXT: text, LABELS: labels } = process.env;
const endpoint = new InferenceClient().endpoint(url + "/hf/zero-shot-classification");
const ask = async (parameters) => (await endpoint.zeroShotClassification({
  inputs: text, parameters: { candidate_labels: JSON.parse(labels), ...parameters }
})).map((e) => [e.label, e.score]);
const found = {
  plain: await ask({}), several: await ask({ multi_label: true }),
  template: await ask({ hypothesis_template: "A customer asks for {}." })
};
try {
  await ask({ candidate_labels: ["a", "a"] });
} catch (error) {
  found.error = JSON.stringify(error.httpResponse.body);
}
console.log(JSON.stringify(found));
"""


class TestHuggingFace:
    def check(self, found: dict[str, Any], native: Callable[..., list[dict[str, Any]]]) -> None:
        """The client's answers are the native ones, a label with a comma is one label, and errors arrive."""
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "several": {"multi_label": True},
            "template": {"label_template": "A customer asks for {label}."},
        }
        for name, asked in options.items():
            [result] = native(text=TEXT, labels=LABELS, **asked)
            expected = [[score["label"], pytest.approx(score["score"], abs=1e-6)] for score in result["scores"]]
            assert found[name] == expected, name
        assert "the same label" in found["error"]

    def test_the_installed_client(self, url: str, native: Any) -> None:
        """The huggingface_hub that tokenalign is installed with, which reads a list of label and score."""
        found = run([sys.executable, "-c", HUGGING_FACE], url)
        assert int(found["version"].split(".")[0]) >= 2
        self.check(found, native)

    def test_an_older_client(self, url: str, native: Any, clients_python: str) -> None:
        """One from before 1.1.5, which reads labels and scores."""
        found = run([clients_python, "-c", HUGGING_FACE], url)
        assert found["version"] == "0.36.2"
        self.check(found, native)

    def test_the_javascript_client(self, url: str, native: Any, javascript: Path) -> None:
        """@huggingface/inference with an endpoint's address."""
        script = javascript / "ask.mjs"
        script.write_text(JAVASCRIPT)
        self.check(run(["node", str(script)], url), native)


COHERE = """
import json, os
import cohere
client = cohere.ClientV2(api_key="none", base_url=os.environ["URL"])
documents = json.loads(os.environ["DOCUMENTS"])
answer = client.rerank(model="minilm-intents", query="card not received", documents=documents, top_n=2)
cut = client.rerank(model="rerank-v3.5", query="card", documents=["short", os.environ["LONG"]])
try:
    client.rerank(model="minilm-intents", query="card", documents=["good", ""])
except cohere.UnprocessableEntityError as error:
    message = error.body["message"] if isinstance(error.body, dict) else error.body.message
first = cohere.Client(api_key="none", base_url=os.environ["URL"])
v1 = first.rerank(query="card not received", documents=documents, top_n=2, return_documents=True)
print(json.dumps({
    "results": [[r.index, r.relevance_score] for r in answer.results], "warnings": answer.meta.warnings,
    "version": answer.meta.api_version.version, "cut": cut.meta.warnings, "error": message,
    "v1": [[r.index, r.relevance_score] for r in v1.results], "texts": [r.document.text for r in v1.results],
}))
"""


class TestReranking:
    def test_cohere(self, url: str, expected: list[list[Any]], clients_python: str) -> None:
        """Cohere's client, both of its APIs: the native scores, what was cut, and an error that names the document."""
        found = run([clients_python, "-c", COHERE], url)
        assert found["results"] == found["v1"] == [pytest.approx(rank) for rank in expected[:2]]
        assert found["texts"] == [DOCUMENTS[i] for i, _ in expected[:2]]
        assert (found["version"], found["warnings"]) == ("2", None)
        assert [warning.split(":")[0] for warning in found["cut"]] == ["documents[1]", "model"]
        assert found["error"].startswith("documents[1]: is empty")

    def test_text_embeddings_inference(self, url: str, expected: list[list[Any]]) -> None:
        """The same ranking in text-embeddings-inference's form."""
        body = {"query": "card not received", "texts": DOCUMENTS, "return_text": True}
        ranks = httpx.post(f"{url}/rerank", json=body, trust_env=False, timeout=60).json()
        assert [[rank["index"], rank["score"]] for rank in ranks] == [pytest.approx(rank) for rank in expected]
        assert [rank["text"] for rank in ranks] == [DOCUMENTS[i] for i, _ in expected]

    def test_the_query_is_not_kept(self, url: str) -> None:
        """A query of a reranking is encoded anew when it comes as a label: it was kept nowhere."""
        query = "a question that nobody else asks here"
        httpx.post(f"{url}/rerank", json={"query": query, "texts": DOCUMENTS}, trust_env=False).raise_for_status()
        body = {"text": TEXT, "labels": [query, "an alternative to it"]}
        for cached in (0, 2):
            usage = httpx.post(f"{url}/v1/classify", json=body, trust_env=False).json()["usage"]
            assert usage["labels_cached"] == cached


TRITON = """
import json, os
import numpy as np
import tritonclient.http as triton
client = triton.InferenceServerClient(os.environ["URL"].removeprefix("http://"))
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("minilm-intents")
metadata = client.get_model_metadata("minilm-intents")
extensions = client.get_server_metadata()["extensions"]
def tensor(name, values, binary):
    data = np.array([value.encode() for value in values], dtype=np.object_)
    made = triton.InferInput(name, list(data.shape), "BYTES")
    made.set_data_from_numpy(data, binary_data=binary)
    return made
def ask(binary, labels, **options):
    inputs = [tensor("text", [os.environ["TEXT"], "Where is my card?"], binary), tensor("labels", labels, binary)]
    outputs = None if binary is True else [
        triton.InferRequestedOutput(name, binary_data=False) for name in ("label", "scores", "labels")
    ]
    return client.infer("minilm-intents", inputs, outputs=outputs, request_id="7", **options)
def plain(answer):
    text = lambda value: value.decode() if isinstance(value, bytes) else value
    return {
        "id": answer.get_response()["id"], "label": [text(v) for v in answer.as_numpy("label")],
        "scores": answer.as_numpy("scores").tolist(), "labels": [text(v) for v in answer.as_numpy("labels")],
    }
labels = json.loads(os.environ["LABELS"])
found = {"binary": plain(ask(True, labels)), "json": plain(ask(False, labels))}
found["options"] = plain(ask(True, labels, parameters={"multi_label": True}))
for name, call in {"twins": lambda: ask(True, ["a", "a"]), "model": lambda: client.get_model_metadata("other")}.items():
    try:
        call()
    except triton.InferenceServerException as error:
        found[name] = error.message()
print(json.dumps({"metadata": metadata, "extensions": extensions, **found}))
"""


class TestOpenInference:
    def test_triton(self, url: str, native: Any, clients_python: str) -> None:
        """Triton's client: health, metadata, and the native scores in binary and as JSON."""
        found = run([clients_python, "-c", TRITON], url)
        assert found["metadata"]["name"] == "minilm-intents"
        assert found["extensions"] == ["binary_tensor_data"]
        for name, options in (("binary", {}), ("json", {}), ("options", {"multi_label": True})):
            results = native(texts=[TEXT, "Where is my card?"], labels=LABELS, **options)
            by_name = [{score["label"]: score["score"] for score in result["scores"]} for result in results]
            assert found[name] == {
                "id": "7",
                "label": [result["label"] for result in results],
                "scores": [[pytest.approx(row[label], abs=1e-6) for label in LABELS] for row in by_name],
                "labels": LABELS,
            }
        assert found["twins"].startswith("inputs[1].data[1]: 'a' is the same label")
        assert found["model"].endswith("there is minilm-intents")


class TestPredict:
    def test_unset(self, url: str) -> None:
        """As it ships no label set is configured, and the answer says how one is."""
        answer = httpx.post(f"{url}/predict", json={"inputs": TEXT}, trust_env=False)
        assert answer.status_code == 404
        assert "dialects.predict_label_set" in answer.json()["error"]


class TestReadme:
    def test_python_examples(self, url: str, clients_python: str) -> None:
        """The README's examples with other programs' clients print what it says."""
        blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL)
        pythons = {"InferenceClient(": sys.executable, "cohere.": clients_python}
        for sign, python in pythons.items():
            [(code, printed)] = [block for block in blocks if sign in block[0]]
            here = code.replace("http://127.0.0.1:8000", url)
            environment = os.environ | {"NO_PROXY": "127.0.0.1"}
            done = subprocess.run([python, "-c", here], capture_output=True, text=True, env=environment, timeout=60)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == printed.strip()

    @pytest.mark.parametrize("path", ["/rerank", "/v2/models/minilm-intents/infer"])
    def test_curl_examples(self, url: str, path: str) -> None:
        """The README's requests give the README's answers, numbers to three digits."""
        pattern = rf"curl -s http://127.0.0.1:8000{re.escape(path)} .*? -d '(.*?)'\n```\n+```json\n(.*?)```"
        [(body, printed)] = re.findall(pattern, README, flags=re.DOTALL)
        answer = httpx.post(f"{url}{path}", content=body, trust_env=False, timeout=60)
        assert rounded(answer.json()) == rounded(json.loads(printed))


def rounded(value: Any) -> Any:
    """The value with its fractions to three digits."""
    match value:
        case float():
            return round(value, 3)
        case list():
            return [rounded(item) for item in value]
        case dict():
            return {key: rounded(item) for key, item in value.items()}
    return value
