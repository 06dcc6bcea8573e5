"""The application as it ships: serve_config.yaml unchanged but for the port."""

import csv
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenalign import TokenAlignClassifier

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

EXAMPLE = {
    "text": "I was charged twice for the same card purchase.",
    "labels": ["duplicate card payment", "cash withdrawal declined", "card not received"],
}


@pytest.fixture(scope="module")
def served(default_app: Any) -> Any:
    """The running application."""
    return default_app


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[httpx.Client]:
    """A client of the running application."""
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def classifier() -> TokenAlignClassifier:
    """The same model in this process."""
    return TokenAlignClassifier.from_pretrained(device="cpu")


@pytest.fixture(scope="module")
def banking(data_root: Path) -> tuple[list[str], list[str]]:
    """500 real messages and the 77 label names."""
    with (data_root / "banking77" / "test.csv").open(encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    labels = json.loads((data_root / "banking77" / "categories.json").read_text(encoding="utf-8"))
    return texts[:: len(texts) // 500][:500], [label.replace("_", " ") for label in labels]


def test_curl_gets_the_librarys_answer(served: Any, classifier: TokenAlignClassifier) -> None:
    """The banner's curl command works, and its answer is the library's."""
    command = ["curl", "-s", f"{served.url}/v1/classify", "-H", "content-type: application/json", "-d"]
    answer = json.loads(subprocess.run([*command, json.dumps(EXAMPLE)], check=True, capture_output=True).stdout)
    expected = classifier(EXAMPLE["text"], EXAMPLE["labels"])
    result = answer["results"][0]
    assert result["label"] == expected["label"]
    assert {s["label"]: s["score"] for s in result["scores"]} == pytest.approx(expected["scores"], abs=1e-3)


def test_the_readmes_curl_gets_the_readmes_answer(client: httpx.Client) -> None:
    """The README's request gives the README's answer, but for fingerprint and what the cache held before."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"/v1/classify .*? -d '(.*?)'\n```\n+```json\n(.*?)```", readme, flags=re.DOTALL)
    assert found is not None
    answer, printed = client.post("/v1/classify", content=found[1]).json(), json.loads(found[2])
    assert answer["usage"].pop("labels_cached") in (0, 3)
    printed["usage"].pop("labels_cached")
    # The fingerprint covers Python's Unicode version, which is not the same everywhere.
    assert len(answer["model"].pop("fingerprint")) == len(printed["model"].pop("fingerprint")) == 64
    scores = [
        [score.pop("score") for score in result.pop("scores")] for result in (*answer["results"], *printed["results"])
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    best = [result.pop("score") for result in (*answer["results"], *printed["results"])]
    assert best[0] == pytest.approx(best[1], abs=1e-3)
    assert answer == printed


@pytest.mark.data
def test_500_messages_against_77_labels_equal_the_library(
    client: httpx.Client, classifier: TokenAlignClassifier, banking: tuple[list[str], list[str]]
) -> None:
    """Alone, concurrently and in one request, scores are the library's within 1e-3, and so is the best label."""
    texts, labels = banking
    expected = classifier(texts, labels)

    def ask(body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = client.post("/v1/classify", json={"labels": labels, **body})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    together = ask({"texts": texts})
    with ThreadPoolExecutor(16) as pool:
        alone = [results[0] for results in pool.map(ask, [{"text": text} for text in texts])]
    for found in (together, alone):
        worst = 0.0
        for result, reference in zip(found, expected, strict=True):
            scores = {score["label"]: score["score"] for score in result["scores"]}
            assert scores.keys() == reference["scores"].keys()
            worst = max(worst, *(abs(scores[name] - value) for name, value in reference["scores"].items()))
            top, second = list(reference["scores"].values())[:2]
            assert result["label"] == reference["label"] or top - second < 1e-4
        assert worst < 1e-3


@pytest.mark.data
def test_a_cached_answer_is_the_first_one(client: httpx.Client, banking: tuple[list[str], list[str]]) -> None:
    """The second answer took all labels from the cache and has the very same numbers."""
    texts, labels = banking
    body = {"text": texts[0], "labels": [f"{label} (again)" for label in labels], "return_logits": True}
    first, second = (client.post("/v1/classify", json=body).json() for _ in range(2))
    assert first["usage"]["labels_cached"] == 0
    assert second["usage"]["labels_cached"] == len(labels)
    assert first["results"] == second["results"]


def test_every_caller_gets_the_own_answer(client: httpx.Client, classifier: TokenAlignClassifier) -> None:
    """Many callers with their own labels and options at once: none gets another's answer."""
    texts = [f"Please tell me about topic number {i}." for i in range(64)]

    def ask(i: int) -> dict[str, Any]:
        labels = [f"topic number {i}", f"something else {i % 7}"]
        answer = client.post("/v1/classify", json={"text": texts[i], "labels": labels, "explain": i % 2 == 0})
        result: dict[str, Any] = answer.json()["results"][0]
        return result

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(ask, range(64)))
    for i, result in enumerate(results):
        expected = classifier(texts[i], [f"topic number {i}", f"something else {i % 7}"])
        assert {s["label"]: s["score"] for s in result["scores"]} == pytest.approx(expected["scores"], abs=1e-3)
        assert ("matches" in result) == (i % 2 == 0)


@pytest.mark.parametrize(
    ("content", "status", "loc"),
    [
        (b'{"text": "a", "labels": ["b"]}', 422, ["labels"]),
        (b'{"text": "a", "labels": ["b", "b"]}', 422, ["labels", 1]),
        (b'{"text": "\\ud800", "labels": ["b", "c"]}', 422, ["text"]),
        (b'{"texts": ["good", "\\u200b"], "labels": ["b", "c"]}', 422, ["texts", 1]),
        (b'{"text": "good", "labels": ["b", "\\u200b"]}', 422, ["labels", 1]),
        (b"{", 422, []),
        (b" " * (16 * 1024 * 1024 + 1), 413, []),
    ],
)
def test_bad_input_is_answered_with_where_it_is(
    client: httpx.Client, content: bytes, status: int, loc: list[Any]
) -> None:
    """Errors cross the processes in their shape."""
    answer = client.post("/v1/classify", content=content)
    assert answer.status_code == status, answer.text
    assert answer.json()["loc"] == loc
    assert answer.json()["error"]


def test_a_thousand_labels_are_answered(client: httpx.Client) -> None:
    """1,000 labels: scores sum to 1 over all, also when only five are returned."""
    body = {"text": EXAMPLE["text"], "labels": [f"label {i}" for i in range(1000)]}
    scores = client.post("/v1/classify", json=body).json()["results"][0]["scores"]
    assert len(scores) == 1000
    assert sum(score["score"] for score in scores) == pytest.approx(1, abs=1e-4)
    few = client.post("/v1/classify", json={**body, "top_k": 5}).json()["results"][0]["scores"]
    assert few == scores[:5]


def test_the_model_and_the_pages_are_there(client: httpx.Client) -> None:
    """`/v1/model`, liveness and the API pages answer, and the pages name no outside host."""
    assert client.get("/v1/model").json()["backbone"]["dtype"] == "float32"
    assert client.get("/health/live").json() == {"status": "live"}
    page = client.get("/docs")
    assert page.status_code == 200
    assert "https://" not in page.text
    assert "ClassifyResponse" in client.get("/openapi.json").text


def test_a_second_start_on_the_same_port_says_so(
    served: Any, tmp_path: Path, project_config: Callable[[], Any]
) -> None:
    """What listens already is named instead of being fought with."""
    import yaml

    from deploy.cli import main

    config = project_config()
    config["http_options"]["port"] = int(served.url.rsplit(":", 1)[1])
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["serve", str(path)]) == 2
