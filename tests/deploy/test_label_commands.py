"""`tokenalign-deploy labels warm`: what it sends, what it says, and its exit status."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import main

ROOT = Path(__file__).parents[2]
ANSWER: dict[str, Any] = {
    "id": "0123456789abcdef" * 2,
    "name": "banking",
    "labels": 3,
    "descriptions": 4,
    "labels_cached": 1,
    "warnings": [{"loc": ["labels", 2], "type": "near_duplicate", "message": "hardly told apart"}],
}


@dataclass
class Service:
    """A server that gives prepared answers, the last one for ever, and keeps what it was sent."""

    url: str
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def will_answer(self, status: int, body: Any) -> None:
        self.answers.append((status, body if isinstance(body, bytes) else json.dumps(body).encode()))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["content-length"])))
            served.requests.append((self.path, sent))
            served.keys.append(self.headers["authorization"])
            status, body = served.answers.pop(0) if len(served.answers) > 1 else served.answers[0]
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Service(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield served
        server.shutdown()
        thread.join()


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text('card payment\n\n{"name": "Bargeld", "description": ["cash", "naïve"]}\na, b\n', encoding="utf-8")
    return path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def warm(labels: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; gives its status and what it printed."""

    def run(*arguments: str, file: Path = labels) -> tuple[int, str, str]:
        status = main(["labels", "warm", "--file", str(file), *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_what_is_sent(warm: Run, service: Service) -> None:
    """The labels in the order of the file, and the name when one is given; below the service's prefix."""
    service.will_answer(201, ANSWER)
    sent = ["card payment", {"name": "Bargeld", "description": ["cash", "naïve"]}, "a, b"]
    assert warm("--url", f"{service.url}/prefix/", "--name", "banking")[0] == 0
    assert warm("--url", service.url)[0] == 0
    assert service.requests == [
        ("/prefix/v1/label-sets", {"labels": sent, "name": "banking"}),
        ("/v1/label-sets", {"labels": sent}),
    ]


def test_a_key_is_taken_from_the_environment(warm: Run, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one; it is on no command line, and one that no header could hold is not repeated."""
    service.will_answer(201, ANSWER)
    monkeypatch.delenv("TOKENALIGN_API_KEY", raising=False)
    assert warm("--url", service.url)[0] == 0
    monkeypatch.setenv("TOKENALIGN_API_KEY", "s3cret")
    assert warm("--url", service.url)[0] == 0
    assert service.keys == [None, "Bearer s3cret"]
    monkeypatch.setenv("TOKENALIGN_API_KEY", "s3cret\n")
    status, _, said = warm("--url", service.url)
    assert status == 2
    assert "TOKENALIGN_API_KEY: must be printable ASCII" in said
    assert "s3cret" not in said


def test_what_is_said(warm: Run, service: Service, labels: Path) -> None:
    """The id on a line of its own, what was done, and each warning with its line of the file."""
    service.will_answer(201, ANSWER)
    status, out, err = warm("--url", service.url)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        ANSWER["id"],
        "  new label set 'banking': 3 labels, 4 descriptions, 3 encoded now, 1 known before",
        "  1 warning:",
        f"    {labels}:4: near_duplicate: hardly told apart",
    ]


def test_a_known_set_without_warnings(warm: Run, service: Service) -> None:
    """That there is nothing to warn of is said too."""
    service.will_answer(
        200, {**ANSWER, "name": None, "labels": 1, "descriptions": 1, "labels_cached": 1, "warnings": []}
    )
    _, out, _ = warm("--url", service.url)
    assert out.splitlines()[1:] == [
        "  known label set: 1 label, 1 description, 0 encoded now, 1 known before",
        "  0 warnings",
    ]


def test_json(warm: Run, service: Service) -> None:
    """For machines, the service's answer as it is."""
    service.will_answer(201, ANSWER)
    _, out, _ = warm("--url", service.url, "--json")
    assert json.loads(out) == ANSWER


def test_a_refusal_names_the_line(warm: Run, service: Service, labels: Path) -> None:
    """What the service says of a label is said with its line in the file; status 1."""
    error = {"error": "labels[1].name: is empty", "error_type": "invalid_input", "loc": ["labels", 1, "name"]}
    service.will_answer(422, error)
    status, out, err = warm("--url", service.url)
    assert (status, out) == (1, "")
    assert err == f"error: {labels}:3: labels[1].name: is empty (status 422)\n"


def test_another_refusal(warm: Run, service: Service) -> None:
    """A refusal about something else than labels names no line."""
    service.will_answer(503, {"error": "the service is starting", "error_type": "not_ready", "loc": []})
    status, _, err = warm("--url", service.url)
    assert (status, err) == (1, "error: the service is starting (status 503)\n")


def test_a_long_list_is_sent_again(warm: Run, service: Service) -> None:
    """A 504 keeps what was encoded, so the set is sent again until it is through."""
    for _ in range(2):
        service.will_answer(504, {"error": "not encoded in time", "error_type": "deadline_exceeded", "loc": []})
    service.will_answer(201, ANSWER)
    assert warm("--url", service.url)[0] == 0
    assert len(service.requests) == 3


@pytest.mark.parametrize("status", [200, 404, 502])
@pytest.mark.parametrize("body", [b"<html>nothing here</html>", b"", b"[]", b'{"detail": "Not Found"}', b"\xff"])
def test_another_server(warm: Run, service: Service, status: int, body: bytes) -> None:
    """What isn't tokenalign's answer is shown, with the question whether the address is right."""
    service.will_answer(status, body)
    exit_status, _, err = warm("--url", service.url)
    assert exit_status == 1
    assert f"{service.url} answered with status {status} and not as tokenalign does" in err
    assert err.endswith("is --url right?\n")


def test_nobody_there(warm: Run) -> None:
    """An address where nothing listens: status 1, and what to look at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        status, _, err = warm("--url", url)
    assert status == 1
    assert f"error: {url}/v1/label-sets can't be reached: " in err
    assert "is the service running" in err


def test_a_server_that_never_answers(warm: Run) -> None:
    """The time limit is named."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        status, _, err = warm("--url", f"http://127.0.0.1:{silent.getsockname()[1]}", "--timeout-s", "0.05")
    assert status == 1
    assert "did not answer within 0.05 s; give a longer --timeout-s" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "127.0.0.1:8000"], "--url is '127.0.0.1:8000'; give the address of the service, such as http://"),
        (["--url", "file:///etc/passwd"], "--url is "),
        (["--url", "http://127.0.0.1:8000/?a=b"], "leave out what follows the path"),
        (["--url", "http://127.0.0.1:1", "--timeout-s", "0"], "--timeout-s is 0; give a number of seconds above 0"),
    ],
)
def test_wrong_options(warm: Run, arguments: list[str], words: str) -> None:
    """Status 2, and nothing is sent."""
    status, out, err = warm(*arguments)
    assert (status, out) == (2, "")
    assert words in err


def test_a_wrong_file(warm: Run, tmp_path: Path) -> None:
    """Status 2 with the file's name."""
    status, _, err = warm(file=tmp_path / "nowhere.txt")
    assert status == 2
    assert "nowhere.txt can't be read" in err


def test_serve_reads_the_lists_of_its_settings_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that can't be read is said before anything is started."""
    monkeypatch.setattr("deploy.cli._start", lambda path: pytest.fail("it was not refused"))
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    config["applications"][0]["args"]["label_sets"] = {"warm": [{"file": str(tmp_path / "nowhere.txt")}]}
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["serve", str(path)]) == 2
    assert "nowhere.txt can't be read" in capsys.readouterr().err
