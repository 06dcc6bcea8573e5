"""The run-book's backup of label sets, on real servers: its own commands, and a copied data folder."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deploy.label_cache.opening import open_store
from deploy.label_sets import Definition, LabelSets
from deploy.settings import Settings
from tokenalign.labels import LabelSet

pytestmark = pytest.mark.redis

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SETS = [
    Definition.of(
        LabelSet.of(["tab\there", "line\nbreak", '"quoted" \\n', "$HOME `id` %s", "ünïcode 日本 👍"]), "odd 'name'"
    ),
    Definition.of(LabelSet.of(["a", "b", {"name": "c", "description": [" first", "second "]}]), None),
]


def commands(name: str) -> str:
    """The block of the run-book with that name."""
    [found] = re.findall(rf"```sh {name}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    block: str = found
    return block


def run_in(folder: Path, words: str, **variables: str) -> str:
    """What commands of the shell print, run in a folder with more variables."""
    shell = ["/bin/sh", "-euc", words]
    return subprocess.check_output(shell, cwd=folder, env={**os.environ, **variables}, text=True, timeout=60)


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The socket of a Redis that keeps its data in a folder as the label cache's does."""
    if (program := shutil.which("redis-server")) is None:
        assert os.environ.get("CI") != "true", "redis-server is absent, and CI must not skip what needs it"
        pytest.skip("redis-server is absent")
    folder.mkdir(exist_ok=True)
    path = folder / "socket"
    options = ["--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--appendonly", "yes", "--save", ""]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
                probe.connect(str(path))
                probe.sendall(b"PING\r\n")
                if probe.recv(16).startswith(b"+PONG"):
                    break
            assert time.monotonic() < deadline
            time.sleep(0.02)  # a condition of another process
        yield str(path)
    finally:
        process.terminate()
        process.wait(30)


@contextlib.asynccontextmanager
async def label_sets(path: str) -> AsyncIterator[LabelSets]:
    """The label sets of a replica that has this server as its store."""
    settings = Settings.parse({"label_cache": {"url": f"unix://{path}"}})
    opened = LabelSets(open_store(settings.label_cache, None))
    try:
        yield opened
    finally:
        await opened.close()


async def define(path: str) -> None:
    async with label_sets(path) as sets:
        for definition in SETS:
            await sets.keep(definition)
            await sets.keep(definition, tenant="somebody")


async def check(path: str) -> None:
    """Every set is known, to its tenant too, as it was."""
    async with label_sets(path) as sets:
        for definition in SETS:
            assert await sets.get(definition.set_id) == definition
            assert await sets.get(definition.set_id, tenant="somebody") == definition
        assert sets.stats.damaged == 0


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


async def test_the_commands_of_the_run_book(short_path: Path) -> None:
    """Backed up, the server lost, restored into a new one: every label set is there, byte for byte."""
    with redis_server(short_path / "old") as path:
        await define(path)
        run_in(short_path, f"redis-cli -s {path} set tokenalign:1:f:list:x row ex 60")
        run_in(short_path, commands("backup"), **{"from": f"redis-cli -s {path}"})
    assert len((short_path / "label-sets.tsv").read_text().splitlines()) == 2 * len(SETS)
    with redis_server(short_path / "new") as path:
        run_in(short_path, commands("restore"), to=f"redis-cli -s {path}")
        await check(path)
        assert int(run_in(short_path, f"redis-cli -s {path} dbsize")) == 2 * len(SETS)


async def test_a_copied_data_folder(short_path: Path) -> None:
    """The append-only files of a stopped server are the label sets of the next."""
    with redis_server(short_path / "old") as path:
        await define(path)
    shutil.copytree(short_path / "old" / "appendonlydir", short_path / "new" / "appendonlydir")
    with redis_server(short_path / "new") as path:
        await check(path)
