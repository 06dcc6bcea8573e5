"""Ray on one machine: loopback, a token of this run, and HAProxy's own ports narrowed."""

import os
import stat
import subprocess
from pathlib import Path

import pytest
import ray

from deploy.doors import ALONE, private_ray

SERVES_FILE = """
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind {host}:8000
listen stats
  bind *:8404
  stats enable
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """In place of HAProxy: prints its arguments and the file that it is given."""
    path = tmp_path / "its own folder" / "program"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\necho "$@"\ncat "$3"\n')
    path.chmod(0o700)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run."""
    path = tmp_path / "run"
    path.mkdir(0o700)
    return path


def test_each_run_has_a_token_of_its_own(folder: Path, tmp_path: Path) -> None:
    """256 random bits in a file that nobody else may read; the token itself is in no variable."""
    found = private_ray({}, folder, None)
    assert found == {**ALONE, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "ray-token")}
    token = Path(found["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    other = private_ray({}, tmp_path, None)["RAY_AUTH_TOKEN_PATH"]
    assert len(token.read_text()) == len(Path(other).read_text()) == 64
    assert token.read_text() != Path(other).read_text()


@pytest.mark.parametrize(
    "given", [{"RAY_AUTH_TOKEN": "x"}, {"RAY_AUTH_TOKEN_PATH": "x"}, {"RAY_AUTH_MODE": "disabled"}]
)
def test_what_is_set_stays(folder: Path, program: Path, given: dict[str, str]) -> None:
    """Who has a token, or wants none, gets none; no variable that is there is set again, and no file is left over."""
    given = {**given, **dict.fromkeys(ALONE, "1"), "RAY_SERVE_HAPROXY_BINARY_PATH": "x"}
    found = private_ray(given, folder, program)
    assert found.keys() <= {"RAY_AUTH_MODE"}
    assert not given.keys() & found.keys()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "*x"])  # noqa: S104  of requests, as the settings say
def test_haproxy_is_started_on_a_narrowed_file(folder: Path, program: Path, host: str) -> None:
    """Its metrics and statistics bind loopback; the address of requests and all arguments are as Serve gave them."""
    script = private_ray({}, folder, program)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    file = folder / "haproxy.cfg"
    file.write_text(SERVES_FILE.format(host=host))
    command = [script, "-db", "-f", str(file), "-sf", "1 2", "-x", "socket"]
    for _ in range(2):  # a file that is narrowed already stays as it is
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        arguments, _, content = printed.partition("\n")
        assert arguments == f"-db -f {file} -sf 1 2 -x socket"
        narrowed = SERVES_FILE.format(host=host).replace(" :9101", " 127.0.0.1:9101")
        assert content == narrowed.replace(" *:8404", " 127.0.0.1:8404")


def test_haproxy_is_not_started_on_a_file_that_is_not_there(folder: Path, program: Path) -> None:
    """Better no HAProxy than one whose doors stand open."""
    script = private_ray({}, folder, program)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    done = subprocess.run([script, "-db", "-f", str(folder / "nowhere")], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""


def test_where_programs_may_not_run_haproxys_own_is_started(
    folder: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder on a file system without programs costs the narrowing, not the service."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in private_ray({}, folder, program)


def test_ray_knows_the_switch() -> None:
    """A later version of Ray that calls it otherwise would listen on every address again."""
    source = (Path(ray.__path__[0]) / "_private" / "ray_constants.py").read_text()
    assert all(f'"{name}"' in source for name in ALONE)
