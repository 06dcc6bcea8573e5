"""The scripts of k8s/: what they refuse, what they make, and how a pod is drained."""

import contextlib
import io
import subprocess
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import yaml

DIGEST = "sha256:" + "1a" * 32


def document(image: str) -> str:
    """A Deployment of one container, as YAML."""
    pod = {"spec": {"containers": [{"name": "a", "image": image}]}}
    return yaml.safe_dump({"kind": "Deployment", "metadata": {"name": "a"}, "spec": {"template": pod}})


@pytest.fixture
def check(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[int, str]]:
    """Runs k8s/check.py on a YAML stream; gives its status and what it printed."""
    script = load_script("check.py")

    def run(text: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            return script.main(), printed.getvalue()

    return run


def test_the_overlays_are_refused_as_they_are(manifests: Any, check: Callable[[str], tuple[int, str]]) -> None:
    """Every image is a placeholder, is said to be one, and could be pulled from nowhere."""
    status, printed = check(yaml.safe_dump_all(manifests.documents))
    assert status == 1
    for where in ("RayService/tokenalign", "StatefulSet/label-cache", "StatefulSet/gcs-redis"):
        assert printed.count(f"{where}: ") == 2  # registry and digest, each once, however many containers


def test_filled_in_overlays_pass(manifests: Any, check: Callable[[str], tuple[int, str]]) -> None:
    """With names and digests in place there is nothing left to say."""
    text = yaml.safe_dump_all(manifests.documents)
    text = text.replace("sha256:" + "0" * 64, DIGEST).replace("registry.example.invalid/", "registry.test/")
    assert check(text) == (0, "5 images, each by its digest\n")


@pytest.mark.parametrize("image", ["redis", "redis:latest", "redis:8", f"redis@{DIGEST[:-1]}", ""])
def test_an_image_without_a_digest_is_refused(check: Callable[[str], tuple[int, str]], image: str) -> None:
    """A tag may mean another image tomorrow."""
    status, printed = check(document(image))
    assert status == 1
    assert "no digest" in printed


def test_an_empty_stream_is_refused(check: Callable[[str], tuple[int, str]]) -> None:
    """A failed rendering before the pipe is not taken for one without faults."""
    assert check("")[0] == 1


def test_secrets_are_new_each_time(load_script: Callable[[str], ModuleType]) -> None:
    """No two passwords are alike, and users.acl holds their hashes alone."""
    script = load_script("make_secrets.py")
    made = [secret["stringData"] for secret in (script.label_cache_secret(), script.gcs_secret(), script.gcs_secret())]
    passwords = [one[key] for one in made for key in ("password", "probe-password", "signing-key") if key in one]
    assert len(set(passwords)) == len(passwords) == 7
    for one in made:
        assert not any(password in one["users.acl"] for password in passwords)


def test_secrets_are_printed_as_manifests(
    load_script: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is two Secrets in the namespace of the manifests."""
    load_script("make_secrets.py").main()
    secrets = [one for one in yaml.safe_load_all(capsys.readouterr().out) if one]
    assert [one["metadata"]["name"] for one in secrets] == ["label-cache-auth", "gcs-redis-auth"]
    assert {(one["kind"], one["metadata"]["namespace"]) for one in secrets} == {("Secret", "tokenalign")}


@pytest.fixture(scope="module")
def drain(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """k8s/base/drain.py."""
    return load_script("base/drain.py")


RAYLET = ["/opt/tokenalign/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet", "--a=b", "--node_id=0af1"]
REPLICA = ["ray::ServeReplica:tokenalign:Scorer"]


def test_the_node_is_found_among_the_processes(drain: ModuleType) -> None:
    """Its id is in the raylet's command line; where no raylet runs there is none."""
    assert drain.node_id([[], ["bash"], ["cat", "--node_id=1"], RAYLET]) == "0af1"
    assert drain.node_id([["bash"]]) is None


def test_replicas_are_found_among_the_processes(drain: ModuleType) -> None:
    """By the title that Ray gives them; a proxy is none."""
    assert drain.has_replica([[], RAYLET, REPLICA])
    assert not drain.has_replica([[], RAYLET, ["ray::ProxyActor"], ["vi", "ray::ServeReplica:"]])


def test_a_drain_asks_and_waits(drain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a replica here, Ray is asked once, and the end waits until the replica is gone."""
    asked: list[tuple[str, int]] = []
    seen = iter([[RAYLET, REPLICA], [RAYLET, REPLICA], [RAYLET, REPLICA], [RAYLET]])
    monkeypatch.setattr(drain, "command_lines", lambda: next(seen))
    monkeypatch.setattr(drain, "ask_to_drain", lambda node, deadline_s: asked.append((node, deadline_s)))
    monkeypatch.setattr(drain, "POLL_S", 0.0)
    assert drain.main(["--deadline-s", "60"]) == 0
    assert asked == [("0af1", 60)]
    assert next(seen, None) is None


@pytest.mark.parametrize("processes", [[RAYLET], [REPLICA], []])
def test_nothing_to_drain(drain: ModuleType, monkeypatch: pytest.MonkeyPatch, processes: list[list[str]]) -> None:
    """A node without replicas, or without Ray, ends at once, and Ray isn't asked."""
    monkeypatch.setattr(drain, "command_lines", lambda: processes)
    monkeypatch.setattr(drain, "ask_to_drain", lambda *_: pytest.fail("asked"))
    assert drain.main(["--deadline-s", "60"]) == 0


def test_a_drain_ends_at_its_deadline(drain: ModuleType) -> None:
    """A replica that stays doesn't keep the pod."""
    assert not drain.wait_until(lambda: False, until=time.monotonic())


def test_a_ray_that_refuses_is_no_failure(drain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's refusal and a command that hangs are said, and the pod ends all the same."""
    for error in (subprocess.CalledProcessError(1, "ray"), subprocess.TimeoutExpired("ray", 20)):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr(drain.subprocess, "run", fail)
        assert not drain.ask_to_drain("0af1", 60)
