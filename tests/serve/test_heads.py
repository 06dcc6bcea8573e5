"""Two heads on one encoder behind real HTTP: every option of a call, by either head, is what the library gives."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenalign import TokenAlignClassifier
from tokenalign.client import TokenAlignClient

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

TEXTS = ["I was charged twice for the same card payment.", "the card was declined, no cash " * 30, "card", "cash " * 9]
LABELS = ["duplicate card payment", {"name": "cash", "description": ["no cash", "cash"]}, "declined"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"multi_label": True, "min_score": 0.5, "top_k": 1},
    {"long_text": "window", "window_stride": 20, "explain": "all"},
    {"label_template": "it is about {label}", "min_margin": 0.9},
]


@pytest.fixture(scope="module")
def folders(make_head: Any, bert_backbone: Path) -> dict[str, Path]:
    """Two random heads on the tiny BERT, both calibrated."""
    calibration = {"scale": 0.7, "bias": -1.5}
    return {
        "first": make_head(bert_backbone, name="first", multi_label=calibration),
        "second": make_head(bert_backbone, name="own", seed=9, max_length=40, width=16, multi_label=calibration),
    }


@pytest.fixture(scope="module")
def url(launch: Any, project_config: Any, wait_until_ready: Any, folders: dict[str, Path]) -> Iterator[str]:
    """A running application with both heads."""
    config = project_config()
    model = {
        "id_or_path": str(folders["first"]),
        "device": "cpu",
        "heads": {"second": {"id_or_path": str(folders["second"])}},
    }
    config["applications"][0]["args"]["model"] = model
    with launch(config) as running:
        wait_until_ready(running)
        yield running.url


@pytest.fixture(scope="module")
def classifiers(folders: dict[str, Path]) -> dict[str, TokenAlignClassifier]:
    """The same heads in this process."""
    return {name: TokenAlignClassifier.from_pretrained(folder, device="cpu") for name, folder in folders.items()}


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for key in found.keys() - {"scores", "score", "matches", "abstained"}:
        assert found[key] == expected[key], key
    assert found["scores"] == pytest.approx(expected["scores"], abs=3e-3)
    if "abstained" in found:
        assert found["abstained"]["reason"] == expected["abstained"]["reason"]
    if "matches" in found:
        words = [[(m["label"], m["description"], m["span"]) for m in r["matches"]] for r in (found, expected)]
        assert words[0] == words[1]


def test_both_at_once(url: str, classifiers: dict[str, TokenAlignClassifier]) -> None:
    """Calls for both heads that run side by side, with all kinds of options, have the library's answers."""
    calls = [(name, options) for options in OPTIONS for name in classifiers] * 2

    def ask(call: tuple[str, dict[str, Any]]) -> list[Any]:
        name, options = call
        with TokenAlignClient(url, transport=httpx.HTTPTransport()) as client:
            return client.classify(TEXTS, LABELS, model=name, **options)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, calls))
    for (name, options), found in zip(calls, answers, strict=True):
        for ours, theirs in zip(found, classifiers[name](TEXTS, LABELS, **options), strict=True):
            assert_same(ours, theirs)


def test_a_stream_of_the_other_head(url: str, classifiers: dict[str, TokenAlignClassifier]) -> None:
    """Line by line too, with labels for each text."""
    labels = [["a", "b"], ["card", "cash", "c"], ["card", "cash"], ["a", "b"]]
    with TokenAlignClient(url, transport=httpx.HTTPTransport()) as client:
        with client.classify_stream(TEXTS, labels, model="second") as stream:
            found = dict(stream)
        assert stream.model == {"name": "second", "fingerprint": classifiers["second"].fingerprint}
        assert stream.usage["labels"] == 2 + 3 + 2
    for i, expected in enumerate(classifiers["second"](TEXTS, labels)):
        assert found[i]["scores"] == pytest.approx(expected["scores"], abs=3e-3)


def test_a_stream_that_is_left(url: str) -> None:
    """After callers who left in the middle of long streams, others are answered as ever."""
    body = {"texts": [f"card payment {i} " * 20 for i in range(1_000)], "labels": LABELS}
    for _ in range(3):
        with (
            httpx.Client(transport=httpx.HTTPTransport(), headers={"accept": "application/x-ndjson"}) as client,
            client.stream("POST", f"{url}/v1/classify", json=body, timeout=60) as response,
        ):
            assert next(response.iter_lines()).startswith('{"index":')
    with TokenAlignClient(url, transport=httpx.HTTPTransport()) as other:
        assert len(other.classify(TEXTS, LABELS)) == len(TEXTS)
        names = httpx.get(f"{url}/v1/models", trust_env=False).json()["models"]
        assert [model["name"] for model in names] == ["first", "second"]
