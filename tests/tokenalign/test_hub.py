"""A head goes to a model hub: a small one of our own, spoken to by huggingface_hub's own client."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import BackboneReference, ModelConfig
from tokenalign.errors import CheckpointError, ConfigError
from tokenalign.hub import model_card

REVISION = "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e"


class Hub(ThreadingHTTPServer):
    """What was asked of it: repositories by id, branches, and the files and message of each commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, Any]] = []
        self.branches: list[str] = []
        self.files: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the tests' output is pytest's."""

    def do_HEAD(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        if name in self.server.files:
            self._answer(200, {}, {"ETag": '"x"', "X-Repo-Commit": "c" * 40})
        else:
            self._answer(404, {}, {"X-Error-Code": "EntryNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            self._answer(403, {"error": "no"})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(200, {"url": f"{self.server.url}/me/head"})
        elif "/branch/" in self.path:
            self.server.branches.append(self.path.rsplit("/", 1)[1])
            self._answer(200, {})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            header = next(line["value"] for line in lines if line["key"] == "header")
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            self.server.files |= files
            self.server.commits.append(header | {"to": self.path.rsplit("/", 1)[1], "files": sorted(files)})
            url = f"{self.server.url}/me/head/commit/{'c' * 40}"
            self._answer(200, {"commitUrl": url, "commitOid": "c" * 40, "success": True})
        else:
            self._answer(200, {})

    def do_GET(self) -> None:
        self._answer(403 if self.server.refuses else 200, {})

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, content in (headers or {}).items():
            self.send_header(name, content)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that takes what it is given."""
    with Hub() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def shareable(bert_classifier: TokenAlignClassifier) -> TokenAlignClassifier:
    """The tiny head, its configuration naming an encoder that others have too."""
    backbone = BackboneReference(reference="Qwen/Qwen3-1.7B", revision=REVISION)
    return TokenAlignClassifier(
        bert_classifier.config.model_copy(update={"backbone": backbone}),
        bert_classifier.backbone,
        bert_classifier.tokenizer,
        bert_classifier.head,
        "0" * 64,
    )


def test_a_pushed_head_is_the_head(
    hub: Hub, shareable: TokenAlignClassifier, bert_backbone: Path, tmp_path: Path
) -> None:
    """The files on the hub are those of save_pretrained, with a card, and load to the same scores."""
    url = shareable.push_to_hub(
        "me/head", private=True, revision="next", commit_message="First", token="hf_x", endpoint=hub.url
    )
    assert url.endswith("/me/head/commit/" + "c" * 40)
    (created,) = hub.created
    assert (created["name"], created["organization"], created["visibility"]) == ("head", "me", "private")
    assert hub.branches == ["next"]
    (commit,) = hub.commits
    assert (commit["summary"], commit["to"]) == ("First", "next")
    assert commit["files"] == ["README.md", "config.json", "model.safetensors"]
    assert hub.tokens == {"Bearer hf_x"}
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(hub.files[name])
    copy = TokenAlignClassifier.from_pretrained(tmp_path, backbone=str(bert_backbone), device="cpu")
    labels = ["cash", "card"]
    assert copy("card twice", labels) == shareable("card twice", labels)


def test_a_card_that_is_there_stays(hub: Hub, shareable: TokenAlignClassifier) -> None:
    """What its author wrote is not written over; no branch is made where none is named."""
    hub.files["README.md"] = b"mine"
    shareable.push_to_hub("me/head", token="hf_x", endpoint=hub.url)
    assert hub.commits[0]["files"] == ["config.json", "model.safetensors"]
    assert hub.commits[0]["summary"] == f"Upload {shareable.config.name}"
    assert hub.branches == []


def test_a_refusal_is_told(hub: Hub, shareable: TokenAlignClassifier) -> None:
    """With the repository and what to look at; so is an id that is none."""
    hub.refuses = True
    with pytest.raises(CheckpointError, match=r"'me/head' can't be pushed to: .*token may write"):
        shareable.push_to_hub("me/head", token="hf_x", endpoint=hub.url)
    with pytest.raises(CheckpointError, match="can't be pushed to"):
        shareable.push_to_hub("a/b/c", token="hf_x", endpoint=hub.url)
    assert hub.commits == []


def test_an_encoder_of_this_machine_is_not_pushed(hub: Hub, bert_classifier: TokenAlignClassifier) -> None:
    """Nobody else could load that head; nothing is asked of the hub."""
    with pytest.raises(ConfigError, match="a folder of this machine"):
        bert_classifier.push_to_hub("me/head", token="hf_x", endpoint=hub.url)
    assert hub.tokens == set()


def test_the_card_says_what_the_head_needs() -> None:
    """Library, encoder, name, and how to load it; a package is no model of a hub."""
    config = ModelConfig.parse(
        {"name": "mine", "backbone": {"reference": "a/b", "revision": REVISION}, "backbone_width": 8}
    )
    card = model_card(config, "me/head")
    assert card.startswith("---\nlibrary_name: tokenalign\n")
    assert "base_model: a/b\n" in card
    assert 'from_pretrained("me/head")' in card
    packaged = config.model_copy(update={"backbone": BackboneReference(reference="package:x")})
    assert "base_model" not in model_card(packaged, "me/head")
