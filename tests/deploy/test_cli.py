"""`tokenalign-deploy serve`: what is wrong is said in one line before anything is started."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import main
from deploy.doors import ALONE
from deploy.http.keys import KeyRing
from tokenalign.errors import ConfigError

ROOT = Path(__file__).parents[2]

Refusal = Callable[[str | bytes], str]


@pytest.fixture
def config() -> dict[str, Any]:
    """The project's own configuration."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Gives the one line that `serve` says of a configuration that it refuses with status 2."""
    unwanted = "a configuration was not refused, Ray would start"
    monkeypatch.setattr("deploy.cli._start", lambda path, folder: pytest.fail(unwanted))
    monkeypatch.setattr("deploy.cli._stop", lambda: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)

    def run(content: str | bytes) -> str:
        path = tmp_path / "serve_config.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert main(["serve", str(path)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1
        return said.err

    return run


def test_no_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A path without a file, or of a folder, is named with what to give instead."""
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        assert main(["serve", str(path)]) == 2
        assert f"error: {path} can't be read: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("applications: [", "is no YAML"),
        (b"# caf\xe9\n", "is no UTF-8"),
        ("", "(whole): "),
        ("- a\n- b\n", "(whole): "),
        ("just words", "(whole): "),
        ("applications: 3", "applications: "),
        ("aplications: []", "applications: Field required"),
        ("applications: []\nproxy_locaton: HeadOnly", "unknown keys proxy_locaton; remove them"),
        ("applications: []\nhttp_options: {prot: 1}", "unknown keys http_options.prot"),
        ("applications: []\nhttp_options: {port: many}", "http_options.port: "),
    ],
)
def test_what_is_no_configuration(refusal: Refusal, content: str | bytes, words: str) -> None:
    """YAML, encoding and Serve's own keys are checked first, each error with the file's name."""
    said = refusal(content)
    assert "serve_config.yaml" in said
    assert words in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"batching": {"max_batch_tokns": 3}}, "batching.max_batch_tokns: unknown key"),
        ({"label_cache": {"url": "redis://:hunter2@host"}}, "label_cache.url: holds a password"),
        ({"limits": {"max_texts": 0}}, "limits.max_texts: "),
    ],
)
def test_settings_are_checked_before_the_start(
    refusal: Refusal, config: dict[str, Any], args: dict[str, Any], words: str
) -> None:
    """Our part of the file is checked before Ray is started, and no password in it is repeated."""
    config["applications"][0]["args"] = args
    said = refusal(yaml.safe_dump(config))
    assert words in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ({"num_replica": 3}, "num_replica"),
        ({"ray_actor_options": {"num_gpu": 1}}, "ray_actor_options.num_gpu"),
        ({"num_replicas": "auto", "autoscaling_config": {"min_replica": 1}}, "autoscaling_config.min_replica"),
    ],
)
def test_mistyped_options_of_a_deployment(
    refusal: Refusal, config: dict[str, Any], typed: dict[str, Any], key: str
) -> None:
    """Serve passes over a key that it doesn't know; we say which one it is, and where."""
    config["applications"][0]["deployments"][1].update(typed)
    assert f"unknown keys applications.0.deployments.1.{key};" in refusal(yaml.safe_dump(config))


class Answering(BaseHTTPRequestHandler):
    """Some other program's HTTP server."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def http_port() -> Iterator[int]:
    """The port of a server that answers HTTP."""
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def mute_port() -> Iterator[int]:
    """The port of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("kind", ["http_port", "mute_port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104  that one is never listened on here
def test_a_port_that_is_taken(
    refusal: Refusal, config: dict[str, Any], request: pytest.FixtureRequest, kind: str, host: str
) -> None:
    """A port on which another program listens, HTTP or not, is named with its key and a remedy."""
    port = request.getfixturevalue(kind)
    config["http_options"] = {"host": host, "port": port}
    config["applications"][0]["args"]["access"] = {"allow_unauthenticated": True}
    said = refusal(yaml.safe_dump(config))
    assert "http_options.port: " in said
    assert f"{host}:{port}; stop it or choose another port" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.com"])  # noqa: S104  that is what is refused
def test_nobody_is_let_in_by_accident(refusal: Refusal, config: dict[str, Any], host: str) -> None:
    """An address that others reach is refused without keys, with all that may be done about it."""
    config["http_options"]["host"] = host
    said = refusal(yaml.safe_dump(config))
    for words in (f"http_options.host: {host} ", "access.keys_file", "127.0.0.1", "access.allow_unauthenticated"):
        assert words in said


@pytest.mark.parametrize("access", [{"allow_unauthenticated": True}, {"keys": {"anna": ["0" * 64]}}, None])
def test_who_has_keys_or_says_so_listens_anywhere(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: dict[str, Any] | None
) -> None:
    """With keys in settings or file, or with the word that everybody may ask, the start goes on."""
    keys = tmp_path / "keys"
    keys.write_text(f"anna {'0' * 64}\n")
    config["http_options"] = {"host": "0.0.0.0", "port": 1}  # noqa: S104  nothing is started
    config["applications"][0]["args"]["access"] = access or {"keys_file": str(keys)}
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))

    class StartedError(Exception):
        pass

    def start(path: Path, folder: Path) -> None:
        raise StartedError

    monkeypatch.setattr("deploy.cli._start", start)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    with pytest.raises(StartedError):
        main(["serve", str(path)])


def test_a_wrong_file_of_keys(refusal: Refusal, config: dict[str, Any], tmp_path: Path) -> None:
    """It is read before anything is started; a key that was put where its hash belongs is not repeated."""
    keys = tmp_path / "keys"
    keys.write_text("tokenalign-hunter2\n")
    config["applications"][0]["args"]["access"] = {"keys_file": str(keys)}
    said = refusal(yaml.safe_dump(config))
    assert f"access.keys_file: {keys} line 1" in said
    assert "hunter2" not in said


def test_the_environment_is_left_as_it_was(
    refusal: Refusal, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is set for Ray is there while the configuration is read, since that imports Ray, and gone afterwards."""
    before, seen = dict(os.environ), {}

    def check(*_: Any) -> None:
        seen.update(os.environ)
        raise ConfigError("enough")

    monkeypatch.setattr("deploy.cli._check_access", check)
    refusal(yaml.safe_dump(config))
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", *ALONE} <= seen.keys()
    assert not Path(seen["RAY_AUTH_TOKEN_PATH"]).exists()
    assert dict(os.environ) == before


def test_a_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`keys new` prints a key and the line that makes it good."""
    assert main(["keys", "new", "anna.2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    keys = tmp_path / "keys"
    keys.write_text(second.removeprefix("line: ") + "\n")
    assert KeyRing({}, keys).name_of(first.removeprefix("key:  ")) == "anna.2"


@pytest.mark.parametrize("name", ["", "a b", "-a", "a" * 65, "é", "a/b"])
def test_a_name_that_is_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would make a line that is none."""
    with contextlib.suppress(SystemExit):  # argparse's own, of what looks like an option
        assert main(["keys", "new", name]) == 2
    assert "key:" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["sreve"], ["serve", "a", "b"], ["keys"], ["keys", "new"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that isn't one shows what there is."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "tokenalign-deploy" in capsys.readouterr().err
