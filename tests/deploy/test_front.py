"""The switches of Serve: HAProxy where it is there, with files and ports of one service alone; what is set stays."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve

from deploy import front
from deploy.front import switches


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        yield int(held.getsockname()[1])


def test_haproxy_keeps_to_its_own_files(tmp_path: Path) -> None:
    """All that HAProxy writes lies in the folder of this run, in paths that a socket's name has room for."""
    found = switches({}, tmp_path)
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    paths = [value for value in found.values() if value.startswith("/")]
    assert len(paths) == len(set(paths)) == 5
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)


def test_what_is_set_stays(tmp_path: Path) -> None:
    """A variable that the user has set is not set again, whatever it says."""
    given = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "0", "RAY_SERVE_HAPROXY_STATS_PORT": "9", "OTHER": "x"}
    found = switches(given, tmp_path)
    assert not given.keys() & found.keys()
    assert "RAY_SERVE_HAPROXY_METRICS_PORT" in found


@pytest.mark.parametrize("given", [{}, {"RAY_SERVE_ENABLE_HA_PROXY": "0"}])
def test_without_haproxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """Where it is missing, or not wanted, nothing of it is set; calls between deployments are as they were."""
    if not given:
        monkeypatch.setattr(front, "has_haproxy", lambda: False)
    assert switches(given, tmp_path) == front.CALLS


def test_a_taken_port_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    """A second service on the machine gets ports of its own, so that neither answers for the other."""
    monkeypatch.setattr(front, "_PORTS", dict.fromkeys(front._PORTS, taken))
    found = switches({}, tmp_path)
    ports = [int(found[name]) for name in front._PORTS]
    assert taken not in ports
    assert all(port > 0 for port in ports)


def test_serve_knows_the_switches() -> None:
    """Every name is one that the installed Serve reads: a switch that a later version renames would do nothing."""
    source = (Path(serve.__path__[0]) / "_private" / "constants.py").read_text()
    for name in (*front.CALLS, *front.HAPROXY, *front._PORTS, *front._FILES):
        assert f'"{name}"' in source
