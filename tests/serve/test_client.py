"""The Python client against the application as it ships: the same call gives what the library gives."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenalign import Label, TokenAlignClassifier
from tokenalign.client import AsyncTokenAlignClient, NotFoundError, TokenAlignClient
from tokenalign.errors import InputError

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

TEXTS = ["I was charged twice for the same card purchase.", "Where is my card? " * 60, "¿Y mi tarjeta?", "card"]
LABELS = ["duplicate card payment", Label("cash", ("cash withdrawal declined", "no cash")), "card not received"]


@pytest.fixture(scope="module")
def client(default_app: Any) -> Iterator[TokenAlignClient]:
    """A client of the running application."""
    with TokenAlignClient(default_app.url, transport=httpx.HTTPTransport()) as opened:
        yield opened


@pytest.fixture(scope="module")
def classifier() -> TokenAlignClassifier:
    """The same model in this process."""
    return TokenAlignClassifier.from_pretrained(device="cpu")


def assert_same(found: Any, expected: Any) -> None:
    """Two results with the same keys, whose numbers differ by no more than fp16 rows make them."""
    assert found.keys() == expected.keys()
    assert (found["label"], found["truncation"]) == (expected["label"], expected["truncation"])
    assert found["warnings"] == expected["warnings"]
    for key in ("scores", "logits"):
        assert found[key] == pytest.approx(expected[key], abs=2e-2 if key == "logits" else 2e-3)
    words = [[(m["label"], m["token"], m["text"], m["span"]) for m in r["matches"]] for r in (found, expected)]
    assert words[0] == words[1]


def test_library_and_client_give_the_same(client: TokenAlignClient, classifier: TokenAlignClassifier) -> None:
    """For many texts and for one, labels with several descriptions, and all that an answer may hold."""
    found = client(TEXTS, LABELS, explain=True, return_logits=True)
    expected = classifier(TEXTS, LABELS, explain=True, return_logits=True)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    one = client(TEXTS[0], LABELS, explain=True, return_logits=True, top_k=2)
    assert_same(one, classifier(TEXTS[0], LABELS, explain=True, return_logits=True, top_k=2))


async def test_the_asynchronous_client_too(default_app: Any, client: TokenAlignClient) -> None:
    """More texts than one request may hold, over several at a time, in order."""
    async with AsyncTokenAlignClient(default_app.url, transport=httpx.AsyncHTTPTransport()) as asynchronous:
        texts = [TEXTS[i % len(TEXTS)] for i in range((await asynchronous.model())["limits"]["max_texts"] + 3)]
        found = await asynchronous.classify(texts, LABELS)
    expected = client.classify(TEXTS, LABELS)
    assert len(found) == len(texts)
    for i, one in enumerate(found):
        assert one["scores"] == pytest.approx(expected[i % len(TEXTS)]["scores"], abs=2e-3)


def test_streams(client: TokenAlignClient, default_app: Any) -> None:
    """Every text gets its answer, and the end says what the call cost."""
    with client.classify_stream(TEXTS, LABELS) as stream:
        found = dict(stream)
        assert stream.usage["labels"] == 4
    with httpx.Client(headers={"Accept": "application/x-ndjson"}) as plain:
        lines = plain.post(f"{default_app.url}/v1/classify", json={"texts": TEXTS, "labels": ["a", "b"]})
    assert lines.headers["content-type"].startswith("application/x-ndjson")
    assert len(lines.text.splitlines()) == len(TEXTS) + 1
    for i, one in enumerate(client.classify(TEXTS, LABELS)):
        assert found[i]["scores"] == pytest.approx(one["scores"], abs=2e-3)


@pytest.mark.parametrize(
    ("texts", "labels"), [(["good", "\ud800"], ["a", "b"]), (" ", ["a", "b"]), ("x", ["a", "a"]), ("x", ["a"])]
)
def test_errors_are_the_librarys(
    client: TokenAlignClient, classifier: TokenAlignClassifier, texts: Any, labels: Any
) -> None:
    """Type, place and words."""
    raised = []
    for ask in (client, classifier):
        with pytest.raises(InputError) as error:
            ask(texts, labels)
        raised.append((error.value.loc, error.value.message))
    assert raised[0] == raised[1]


def test_label_sets(client: TokenAlignClient) -> None:
    """A set's id stands for its labels, until it is forgotten."""
    report = client.add_label_set(LABELS, name="cards")
    assert client.label_set(report.id).labels.names == ("duplicate card payment", "cash", "card not received")
    by_id, by_labels = client.classify(TEXTS[0], label_set=report.id), client.classify(TEXTS[0], LABELS)
    assert by_id["scores"] == pytest.approx(by_labels["scores"], abs=2e-3)
    client.delete_label_set(report.id)
    with pytest.raises(NotFoundError):
        client.label_set("0" * 32)


def test_the_readmes_examples(default_app: Any) -> None:
    """What the README says that a client prints, it prints."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", readme, flags=re.DOTALL)
    asking = [(code, printed) for code, printed in blocks if "TokenAlignClient(" in code]
    assert asking
    for code, printed in asking:
        here = code.replace("http://127.0.0.1:8000", default_app.url)
        environment = os.environ | {"NO_PROXY": "127.0.0.1"}
        done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == printed.strip()
