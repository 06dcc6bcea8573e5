"""What a running application listens on is what docs/security.md says, and it keeps to itself what it is told."""

import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import psutil
import pytest

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
WHERE_FREE = {"monitor.py", "dashboard.py"}
"""Have one port each on a machine, and do without where another Ray has it."""


@dataclass(frozen=True)
class Door:
    """A listening socket: whose, and where."""

    process: str
    address: str
    port: int


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    processes: tuple[str, ...]
    port: str
    address: str

    def covers(self, door: Door, host: str, port: int) -> bool:
        """Whether it speaks of the door, of an application at host and port."""
        addresses = {"`http_options.host`": {host}, "127.0.0.1": {"127.0.0.1"}, "**every address**": {"::", "0.0.0.0"}}  # noqa: S104
        return (
            door.process.startswith(self.processes)
            and door.address in addresses[self.address]
            and self._has(door.port, port)
        )

    def _has(self, port: int, of_requests: int) -> bool:
        if self.port == "`http_options.port`":
            return port == of_requests
        if "a free one" in self.port:
            return port >= 1_024
        first, _, last = self.port.partition(" to ")
        return int(first) <= port <= int(last or first)


@pytest.fixture(scope="module")
def table() -> list[Row]:
    """The table of the documentation."""
    lines = re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \| .+ \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = [Row(tuple(re.findall(r"`(.+?)`", who)), port, address) for who, port, address in lines]
    assert len(rows) == 11
    return rows


@pytest.fixture(scope="module")
def doors(default_app: Any) -> list[Door]:
    """What the application and all that it started listen on, once HAProxy is there: at first one follows another."""
    root = psutil.Process(default_app.process.pid)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [door for process in (root, *root.children(recursive=True)) for door in doors_of(process, root)]
        if sum(door.process == "haproxy" for door in found) >= 3:
            return found
        time.sleep(0.2)  # a condition of another process, asked for again
    pytest.fail("HAProxy does not listen")


def doors_of(process: psutil.Process, root: psutil.Process) -> Iterator[Door]:
    """The TCP ports that a process listens on; of one that has just ended none."""
    try:
        words, connections = process.cmdline(), process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    name = words[0].split()[0] if words and words[0].startswith("ray::") else (scripts or [process.name()])[0]
    for one in connections:
        if one.status == psutil.CONN_LISTEN:
            address = one.laddr.ip.removeprefix("::ffff:")
            yield Door("tokenalign-deploy" if process == root else name, address, one.laddr.port)


def test_every_door_is_in_the_documentation(default_app: Any, doors: list[Door], table: list[Row]) -> None:
    """Nothing listens that the table doesn't name, nowhere that it doesn't name, and what it names is there."""
    parts = urlsplit(default_app.url)
    host, port = str(parts.hostname), int(parts.port or 0)
    assert [door for door in doors if not any(row.covers(door, host, port) for row in table)] == []
    unused = [row for row in table if not any(row.covers(door, host, port) for door in doors)]
    assert [row for row in unused if not WHERE_FREE.issuperset(row.processes)] == []


def test_what_others_reach_asks_for_the_token(doors: list[Door]) -> None:
    """Calls to a replica, and jobs, are refused without it."""
    reached = [door for door in doors if door.address in {"::", "0.0.0.0"}]  # noqa: S104
    assert reached
    for door in reached:
        with grpc.insecure_channel(f"127.0.0.1:{door.port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    [agent] = [door for door in doors if door.port == 52365]
    jobs = f"http://{agent.address}:{agent.port}/api/job_agent/jobs/"
    assert httpx.post(jobs, json={"entrypoint": "true"}, timeout=30, trust_env=False).status_code == 401


def test_no_text_label_or_key_is_kept(default_app: Any, doors: list[Door]) -> None:
    """What a caller sends, good or bad, is in no log of Ray or Serve, in no metric, and not told of the model."""
    planted = {name: f"{name}{secrets.token_hex(8)}" for name in ("text", "label", "name", "key", "path", "header")}
    headers = {"authorization": f"Bearer {planted['key']}", "x-note": planted["header"]}
    labels = [{"name": planted["name"], "description": planted["label"]}, "another"]
    good = {"text": planted["text"], "labels": labels}
    with httpx.Client(base_url=default_app.url, headers=headers, timeout=60, trust_env=False) as client:
        assert client.post("/v1/classify", json=good).status_code == 200
        kept = client.post("/v1/label-sets", json={"name": planted["name"], "labels": labels})
        assert client.delete(f"/v1/label-sets/{kept.json()['id']}").status_code == 204
        for bad in (
            {**good, "labels": [planted["label"]]},
            {**good, planted["name"]: 1},
            {**good, "model": planted["name"]},
        ):
            assert client.post("/v1/classify", json=bad).status_code in {404, 422}
        assert client.post("/v1/classify", content=planted["text"]).status_code == 422
        assert client.get(f"/{planted['path']}", params={"q": planted["path"]}).status_code == 404
        assert client.get("/v1/model", headers={"host": planted["header"]}).status_code == 403
        told = client.get("/v1/model").text + client.get("/v1/models").text
    told += default_app.log.read_text() + "".join(metrics_of(doors))
    root = psutil.Process(default_app.process.pid)
    logs = session_of(root) / "logs"
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert files
    told += "".join(path.read_text(errors="replace") for path in files)
    assert "tokenalign" in told
    assert [name for name, value in planted.items() if value in told] == []


def metrics_of(doors: list[Door]) -> Iterator[str]:
    """What doors on loopback tell who asks for metrics."""
    for door in doors:
        if door.process in {"haproxy", "ray::DashboardAgent"}:
            try:
                yield httpx.get(f"http://127.0.0.1:{door.port}/metrics", timeout=30, trust_env=False).text
            except httpx.HTTPError:
                continue  # no HTTP


def session_of(root: psutil.Process) -> Path:
    """The folder of a Ray's session, from the arguments of its processes."""
    for process in root.children(recursive=True):
        if found := re.search(r"/\S*/session_[0-9_-]+", " ".join(process.cmdline())):
            return Path(os.path.realpath(found[0]))
    pytest.fail("no process of Ray names its session")
