"""Other encoders through the same served path: random-weight Qwen3 and Qwen3.5, and a store that is not embedded."""

import itertools
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tokenalign import TokenAlignClassifier

pytestmark = [pytest.mark.serve, pytest.mark.data, pytest.mark.redis, pytest.mark.timeout(600)]

PASSWORD = "known-to-the-test"
TEXT = "I paid twice <think> for the same 日本 card 👍 purchase."
LABELS = [
    "duplicate card payment",
    {"name": "cash", "description": ["cash withdrawal declined", "no cash"]},
    "late card",
]


class RedisServer:
    """A real Redis server with a password, which may be killed and started again."""

    def __init__(self, binary: str, port: int, folder: Path) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self._port, self._folder = port, folder
        self._command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", PASSWORD]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
        pytest.fail("redis-server doesn't listen after 30 s")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def keys(self, pattern: str = "tokenalign:*") -> list[bytes]:
        """The keys once there are any; each must have a time to live."""
        with redis.Redis.from_url(self.url, password=PASSWORD) as store:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if keys := list(store.scan_iter(pattern)):
                    assert all(store.ttl(key) > 0 for key in keys)
                    return keys
        return []


@pytest.fixture(scope="module")
def redis_server(free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A running Redis server."""
    binary = shutil.which("redis-server")
    if binary is None:
        if os.environ.get("CI") == "true":
            pytest.fail("redis-server is not installed, and CI must not skip what needs it")
        pytest.skip("redis-server is not installed")
    server = RedisServer(binary, free_port(), tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def apps(
    launch: Any,
    project_config: Any,
    wait_until_ready: Any,
    redis_server: RedisServer,
    qwen3_head: Path,
    qwen35_head: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[str, Path]]]:
    """Two applications on one Ray: the URL and the head's folder of each."""
    secret = tmp_path_factory.mktemp("secret") / "password"
    secret.write_text(PASSWORD + "\n")
    config = project_config()
    base = config["applications"][0]
    small = [{**d, "ray_actor_options": {"num_cpus": 0.2}} for d in base["deployments"]]
    store = {"url": redis_server.url, "password": {"file": str(secret)}}
    apps = {
        "qwen3": (qwen3_head, {"label_cache": store}),
        "qwen35": (qwen35_head, {"model": {"project_on_encoder": False}, "label_cache": {"url": "embedded"}}),
    }
    config["applications"] = [
        {
            **base,
            "name": name,
            "route_prefix": f"/{name}",
            "args": {**args, "model": {**args.get("model", {}), "id_or_path": str(head), "device": "cpu"}},
            "deployments": small,
        }
        for name, (head, args) in apps.items()
    ]
    with launch(config) as running:
        for name in apps:
            wait_until_ready(running, f"/{name}")
        yield {name: (f"{running.url}/{name}", head) for name, (head, _) in apps.items()}
        assert PASSWORD not in running.log.read_text()


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_served_answers_equal_the_librarys(apps: dict[str, tuple[str, Path]], name: str) -> None:
    """Scores, matches and spans of a decoder with a byte-level tokenizer are those of the library."""
    url, head = apps[name]
    expected = TokenAlignClassifier.from_pretrained(head, device="cpu")(TEXT, LABELS, explain="all", return_logits=True)
    body = {"text": TEXT, "labels": LABELS, "explain": "all", "return_logits": True}
    answer = httpx.post(f"{url}/v1/classify", json=body, timeout=60, trust_env=False).json()
    again = httpx.post(f"{url}/v1/classify", json=body, timeout=60, trust_env=False).json()
    result = answer["results"][0]
    assert result["label"] == expected["label"]
    assert {s["label"]: s["score"] for s in result["scores"]} == pytest.approx(expected["scores"], abs=1e-3)
    assert [(m["token"], m["label_span"]) for m in result["matches"]] == [
        (m["token"], m["label_span"]) for m in expected["matches"]
    ]
    for match in result["matches"]:
        assert TEXT[slice(*match["span"])] == match["text"]
    for score in result["scores"]:
        contributions = [m["contribution"] for m in result["matches"] if m["label"] == score["label"]]
        assert sum(contributions) == pytest.approx(score["logit"], abs=1e-4)
    assert again["usage"]["labels_cached"] == 4
    assert again["results"] == answer["results"]


def test_redis_may_die_and_come_back_in_mid_traffic(
    apps: dict[str, tuple[str, Path]], redis_server: RedisServer
) -> None:
    """Rows stand in the Redis of the settings; without it, and after it, every request has the same scores."""
    url, head = apps["qwen3"]
    classifier = TokenAlignClassifier.from_pretrained(head, device="cpu")
    stop = threading.Event()
    failures: list[str] = []

    def ask(client: httpx.Client, labels: list[str]) -> None:
        answer = client.post(f"{url}/v1/classify", json={"text": TEXT, "labels": labels})
        if answer.status_code != 200:
            failures.append(answer.text)
            return
        scores = {s["label"]: s["score"] for s in answer.json()["results"][0]["scores"]}
        if scores != pytest.approx(classifier(TEXT, labels)["scores"], abs=1e-3):
            failures.append(f"other scores for {labels}")

    def traffic() -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            for number in itertools.count():
                if stop.is_set():
                    return
                ask(client, ["a known label", f"new label number {number}"])

    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60, trust_env=False) as client:
        running = pool.submit(traffic)
        try:
            assert redis_server.keys()
            redis_server.kill()
            for number in range(20):
                ask(client, ["a known label", f"label {number} without a store"])
            redis_server.start()
            assert redis_server.keys(), "nothing was written after Redis came back"
        finally:
            stop.set()
            running.result(120)
    assert failures == []
