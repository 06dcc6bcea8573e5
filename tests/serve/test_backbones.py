"""Other encoders through the same served path: random-weight Qwen3 and Qwen3.5, and a store that is not embedded."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tokenalign import TokenAlignClassifier

pytestmark = [pytest.mark.serve, pytest.mark.data, pytest.mark.redis, pytest.mark.timeout(600)]

TEXT = "I paid twice <think> for the same 日本 card 👍 purchase."
LABELS = [
    "duplicate card payment",
    {"name": "cash", "description": ["cash withdrawal declined", "no cash"]},
    "late card",
]


@pytest.fixture(scope="module")
def redis_url(free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis server with a password."""
    binary = shutil.which("redis-server")
    if binary is None:
        import os

        if os.environ.get("CI") == "true":
            pytest.fail("redis-server is not installed, and CI must not skip what needs it")
        pytest.skip("redis-server is not installed")
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", "known-to-the-test"]
    process = subprocess.Popen(command, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def apps(
    launch: Any,
    project_config: Any,
    wait_until_ready: Any,
    redis_url: str,
    qwen3_head: Path,
    qwen35_head: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[str, Path]]]:
    """Two applications on one Ray: the URL and the head's folder of each."""
    secret = tmp_path_factory.mktemp("secret") / "password"
    secret.write_text("known-to-the-test\n")
    config = project_config()
    base = config["applications"][0]
    small = [{**d, "ray_actor_options": {"num_cpus": 0.2}} for d in base["deployments"]]
    store = {"url": redis_url, "password": {"file": str(secret)}}
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
        assert "known-to-the-test" not in running.log.read_text()


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


def test_rows_are_kept_in_the_redis_that_the_settings_name(apps: dict[str, tuple[str, Path]], redis_url: str) -> None:
    """The entries stand in Redis under our namespace, each with a time to live."""
    import redis

    url, _ = apps["qwen3"]
    httpx.post(f"{url}/v1/classify", json={"text": TEXT, "labels": LABELS}, timeout=60, trust_env=False)
    with redis.Redis.from_url(redis_url, password="known-to-the-test") as store:
        deadline = time.monotonic() + 30
        while not (keys := store.keys("tokenalign:*")) and time.monotonic() < deadline:
            pass
        assert keys
        assert all(store.ttl(key) > 0 for key in keys)
