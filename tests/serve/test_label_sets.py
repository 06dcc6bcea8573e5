"""Label sets on a real application of two ingresses and two scorers: what one replica keeps, any replica knows."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from deploy.cli import main
from deploy.label_cache.server import bundled_binary
from tokenalign import LabelSet, TokenAlignClassifier
from tokenalign.labels import label_set_id

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

PATIENCE_S = 120.0  # of the machine, not a promise
TEXT = "I was charged twice for the same card purchase."
LISTED: list[Any] = [
    "card payment declined",
    {"name": "cash", "description": ["cash not received", "no cash"]},
    "other, things",
]
LISTED_ID = label_set_id(LabelSet.of(LISTED))


class Store:
    """A Valkey server on a loopback port, which can be killed and started again, empty."""

    def __init__(self, port: int, folder: Path) -> None:
        self._command = [str(bundled_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self._folder = folder
        self.url = f"redis://127.0.0.1:{port}"
        self.client = redis.Redis.from_url(self.url, protocol=2)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
        eventually(self._answers, "the store answers")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def reads(self) -> int:
        """How many reads of one key the server has done."""
        return int(self.client.info("commandstats").get("cmdstat_getrange", {}).get("calls", 0))

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


@dataclass
class Application:
    """A running application, its store and a client."""

    url: str
    store: Store
    client: httpx.Client
    head: Path

    def post(self, labels: list[Any]) -> httpx.Response:
        return self.client.post("/v1/label-sets", json={"labels": labels})

    def statuses(self, set_id: str) -> set[int]:
        """What many requests at once for a definition were answered with, by whichever replicas."""
        with ThreadPoolExecutor(8) as pool:
            path = f"/v1/label-sets/{set_id}"
            return {response.status_code for response in pool.map(self.client.get, [path] * 32)}


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.02)  # a condition of other processes, asked for again


@pytest.fixture(scope="module")
def app(
    launch: Any,
    project_config: Any,
    wait_until_ready: Any,
    free_port: Callable[[], int],
    bert_head: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Application]:
    """The tiny BERT behind two ingresses and two scorers, with a list of the settings."""
    folder = tmp_path_factory.mktemp("label-sets")
    listed = folder / "listed.txt"
    listed.write_text("".join(f"{label if isinstance(label, str) else json.dumps(label)}\n" for label in LISTED))
    store = Store(free_port(), folder)
    config = project_config()
    [application] = config["applications"]
    application["args"] = {
        "model": {"id_or_path": str(bert_head), "device": "cpu"},
        "label_cache": {"url": store.url, "breaker_open_s": 0.2},
        "label_sets": {"warm": [{"file": str(listed), "name": "listed"}], "memory_ttl_s": 0.5},
        "dialects": {"predict_label_set": "listed"},
    }
    application["deployments"] = [
        {"name": name, "num_replicas": replicas, "ray_actor_options": {"num_cpus": 0.2}}
        for name, replicas in (("Ingress", 2), ("Encoder", 1), ("Scorer", 2))
    ]
    try:
        with launch(config) as running:
            wait_until_ready(running)
            with httpx.Client(base_url=running.url, timeout=60, trust_env=False) as client:
                yield Application(running.url, store, client, bert_head)
    finally:
        store.client.close()
        store.kill()


def test_a_list_of_the_settings_is_encoded_before_ready(app: Application) -> None:
    """The first requests with its id find every label encoded, on whichever scorer they land."""
    for i in range(8):
        answer = app.client.post("/v1/classify", json={"text": f"{TEXT} {i}", "label_set": LISTED_ID}).json()
        assert answer["usage"]["labels_cached"] == 4
    assert app.client.get(f"/v1/label-sets/{LISTED_ID}").json() == {"id": LISTED_ID, "name": "listed", "labels": LISTED}


def test_predict_has_the_labels_of_the_settings(app: Application) -> None:
    """`/predict` scores the list that the settings name as the native route scores it, for one text and for several."""
    body = {"text": TEXT, "label_set": LISTED_ID}
    [result] = app.client.post("/v1/classify", json=body).json()["results"]
    scores = [{"label": s["label"], "score": pytest.approx(s["score"], abs=1e-6)} for s in result["scores"]]
    assert app.client.post("/predict", json={"inputs": TEXT}).json() == scores
    assert app.client.post("/predict", json={"inputs": [[TEXT]]}).json() == [scores]


def test_any_replica_knows_what_another_keeps(app: Application) -> None:
    """A set is posted to one ingress, which then has it in memory: the other reads it from the store."""
    labels = ["duplicate card payment", "cash withdrawal declined", "card not received"]
    expected = TokenAlignClassifier.from_pretrained(app.head, device="cpu")(TEXT, labels)["scores"]
    posted = app.post(labels)
    assert posted.status_code == 201
    set_id = posted.json()["id"]
    before = app.store.reads()

    def read_by_the_other() -> bool:
        assert app.statuses(set_id) == {200}
        return app.store.reads() > before

    eventually(read_by_the_other, "another replica asks the store")
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"text": TEXT, "label_set": set_id}] * 32
        responses = list(pool.map(lambda body: app.client.post("/v1/classify", json=body), bodies))
    for response in responses:
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["labels_cached"] == 3
        scores = {score["label"]: score["score"] for score in response.json()["results"][0]["scores"]}
        assert scores == pytest.approx(expected, abs=1e-3)
    assert app.post(labels[::-1]).status_code == 200
    [key] = app.store.client.keys(f"*:set:{set_id}")
    assert app.store.client.ttl(key) == -1


def test_a_deleted_set_is_soon_unknown_everywhere(app: Application) -> None:
    """After a delete all replicas answer 404 once their memory's time is over, also to classify."""
    set_id = app.post(["to be deleted", "another"]).json()["id"]
    assert app.statuses(set_id) == {200}
    assert app.client.delete(f"/v1/label-sets/{set_id}").status_code == 204
    eventually(lambda: app.statuses(set_id) == {404}, "every replica has forgotten it")
    response = app.client.post("/v1/classify", json={"text": TEXT, "label_set": set_id})
    assert (response.status_code, response.json()["error_type"]) == (404, "unknown_label_set")
    assert response.json()["loc"] == ["label_set"]


def test_the_command_line(app: Application, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of labels becomes a set, with its lint by line, and a bad line is named."""
    path = tmp_path / "labels.txt"
    path.write_text("Top-up failed\ntop up failed!\nlong " + "word " * 200 + "\n")
    assert main(["labels", "warm", "--file", str(path), "--url", app.url, "--name", "top-ups"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert f"{path}:2: near_duplicate: 'top up failed!' is hardly told apart from 'Top-up failed'" in "\n".join(said)
    assert f"{path}:3: truncated: " in "\n".join(said)
    assert app.client.get(f"/v1/label-sets/{said[0]}").json()["name"] == "top-ups"
    path.write_text("good\n\n\u200b\n", encoding="utf-8")
    assert main(["labels", "warm", "--file", str(path), "--url", app.url]) == 1
    assert f"error: {path}:3: " in capsys.readouterr().err


def test_errors_of_the_scorer_cross_the_processes(app: Application) -> None:
    """A label without a token is a 422 at its place, and the set is not kept."""
    response = app.post(["good", {"name": "bad", "description": ["fine", "\u200b"]}])
    assert (response.status_code, response.json()["loc"]) == (422, ["labels", 1, "description", 1])


def test_the_store_is_killed_and_comes_back_empty(app: Application) -> None:
    """While it is gone: 503 for what only it could tell; lists of the settings and labels sent along are served. Back,
    and empty, it has lost the posted sets, which is a 404 that says to post them again, and that works."""
    labels = ["known before", "the store is gone"]
    set_id = app.post(labels).json()["id"]
    app.store.kill()
    for path, body in (
        ("/v1/label-sets", {"labels": ["new", "meanwhile"]}),
        ("/v1/classify", {"text": TEXT, "label_set": label_set_id(LabelSet.of(["new", "meanwhile"]))}),
    ):
        response = app.client.post(path, json=body)
        assert (response.status_code, response.json()["error_type"]) == (503, "label_sets_unavailable"), response.text
    for given in ({"label_set": LISTED_ID}, {"labels": labels}):
        assert app.client.post("/v1/classify", json={"text": TEXT, **given}).status_code == 200
    assert app.client.get("/health/ready").status_code == 200
    app.store.start()
    eventually(lambda: app.statuses(set_id) == {404}, "every replica has asked the new store")
    assert app.client.post("/v1/classify", json={"text": TEXT, "label_set": LISTED_ID}).status_code == 200
    assert app.post(labels).status_code == 201
    assert app.statuses(set_id) == {200}
