"""Real servers on loopback: one, a Sentinel group, a cluster, one with TLS; and a proxy that makes trouble between."""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.backoff import NoBackoff
from redis.retry import Retry

PATIENCE_S = 60.0  # of the machine, whose cores are shared; no promise of ours
STORE_RIGHTS = "+getrange +get +set +pexpire +del +eval +ping"
CLUSTER_RIGHTS = "+cluster|slots +command +asking"


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Returns once a condition of other processes holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.01)


class Server:
    """A redis-server on a loopback port of its own, which it keeps when it is started again."""

    def __init__(
        self, binary: str, folder: Path, lines: tuple[str, ...], *, sentinel: bool, tls: "Certificates | None"
    ):
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = folder
        self._command = [binary, str(folder / "conf"), *(["--sentinel"] if sentinel else [])]
        self._tls = tls
        listen = [f"port {self.port}"] if tls is None else ["port 0", f"tls-port {self.port}", *tls.lines()]
        config = [*listen, "bind 127.0.0.1", f"dir {folder}", *lines]
        self.conf = folder / "conf"
        self.conf.write_text("\n".join(config) + "\n")

    @property
    def url(self) -> str:
        return f"{'redis' if self._tls is None else 'rediss'}://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def admin(self) -> Iterator[redis.Redis]:
        """A client of a user who may do everything."""
        options = {} if self._tls is None else self._tls.options()
        patience: dict[str, Any] = {"socket_timeout": PATIENCE_S, "retry": Retry(NoBackoff(), 0)}
        with redis.Redis(host="127.0.0.1", port=self.port, protocol=2, **patience, **options) as client:
            yield client

    def start(self, *, wait: bool = True) -> None:
        """Returns once it answers, be it that it is loading; without `wait` at once."""
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        if wait:
            eventually(self._answers, f"start of {self._command}")

    def kill(self) -> None:
        """Ends it as a crash would."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def ask(self, *command: Any) -> Any:
        """The answer to one command of that user."""
        with self.admin() as admin:
            return admin.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it bare

    def role(self) -> str:
        """ "master" or "slave"; "" while it drops its connections to change."""
        with contextlib.suppress(redis.ConnectionError):
            return str(self.ask("ROLE")[0].decode())
        return ""

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile the kernel accepts connections for it, but nobody answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self._folder / "log").read_text()
        try:
            return bool(self.ask("PING"))
        except (redis.exceptions.BusyLoadingError, redis.AuthenticationError):
            return True
        except redis.ConnectionError:
            return False


class Certificates:
    """A throw-away authority; what it signed for 127.0.0.1, for another host, and for a client; another authority."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.other_ca = folder / "ca.pem", folder / "other_ca.pem"
        self.server, self.elsewhere, self.client = (
            folder / f"{name}.pem" for name in ("server", "elsewhere", "client")
        )
        signer = self._authority(self.ca)
        self._authority(self.other_ca)
        self._signed(self.server, signer, x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        self._signed(self.elsewhere, signer, x509.DNSName("redis.example"))
        self._signed(self.client, signer, x509.DNSName("client.example"))

    @staticmethod
    def key_of(certificate: Path) -> Path:
        return certificate.with_suffix(".key")

    def lines(self, certificate: Path | None = None) -> list[str]:
        """Configuration of a server that asks its clients for certificates."""
        own = certificate or self.server
        return [
            f"tls-cert-file {own}",
            f"tls-key-file {self.key_of(own)}",
            f"tls-ca-cert-file {self.ca}",
            "tls-auth-clients yes",
        ]

    def options(self) -> dict[str, Any]:
        """Keywords for redis-py."""
        files = {"ssl_ca_certs": self.ca, "ssl_certfile": self.client, "ssl_keyfile": self.key_of(self.client)}
        return {"ssl": True, **{name: str(path) for name, path in files.items()}}

    def _authority(self, path: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Name]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, path.stem)])
        usage = x509.KeyUsage(**dict.fromkeys(KEY_USAGES, False) | {"key_cert_sign": True, "crl_sign": True})
        builder = self._builder(name, name, key).add_extension(x509.BasicConstraints(True, 0), critical=True)
        self._write(path, builder.add_extension(usage, critical=True), key, key)
        return key, name

    def _signed(self, path: Path, signer: tuple[ec.EllipticCurvePrivateKey, x509.Name], name: x509.GeneralName) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, path.stem)])
        builder = self._builder(subject, signer[1], key)
        self._write(path, builder.add_extension(x509.SubjectAlternativeName([name]), critical=False), key, signer[0])

    @staticmethod
    def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        return x509.CertificateBuilder(
            issuer, subject, key.public_key(), x509.random_serial_number(), now - day, now + day
        )

    def _write(
        self,
        path: Path,
        builder: x509.CertificateBuilder,
        key: ec.EllipticCurvePrivateKey,
        signer: ec.EllipticCurvePrivateKey,
    ) -> None:
        path.write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.key_of(path).write_bytes(key.private_bytes(*form))


KEY_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class Cluster:
    """Masters that share the hash slots, and replicas of the first one."""

    def __init__(self, masters: list[Server], replicas: list[Server]) -> None:
        self.masters, self.replicas = masters, replicas
        for i, server in enumerate(masters):
            first, end = 16_384 * i // len(masters), 16_384 * (i + 1) // len(masters)
            server.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in [*masters[1:], *replicas]:
            bus = server.ask("CONFIG", "GET", "cluster-port")[1]
            masters[0].ask("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        for server in replicas:
            eventually(lambda server=server: self._follows(server), "replica")  # type: ignore[misc]
        self.wait_until_ok()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.masters)

    def wait_until_ok(self) -> None:
        """Returns once every node that runs thinks that all slots are served, and knows all others."""
        for server in [*self.masters, *self.replicas]:
            if server.process is not None:
                eventually(lambda server=server: self._ok(server), "cluster")  # type: ignore[misc]

    def _ok(self, server: Server) -> bool:
        nodes = len(self.masters) + len(self.replicas)
        return server.ask("CLUSTER INFO")["cluster_state"] == "ok" and len(server.ask("CLUSTER NODES")) == nodes

    def _follows(self, server: Server) -> bool:
        try:
            server.ask("CLUSTER", "REPLICATE", self.masters[0].ask("CLUSTER", "MYID"))
        except redis.ResponseError:  # it hasn't met the master yet
            return False
        return True


class Proxy:
    """A TCP proxy on loopback whose upstream may change, that can stop answering, or answer in small pieces.

    connections: how many came; forwarded_bytes: of answers
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.upstream_port = 0
        self.piece_bytes: int | None = None
        self.answering = asyncio.Event()
        self.answering.set()
        self.connections = 0
        self.forwarded_bytes = 0
        self._running: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        try:
            yield
        finally:
            server.close()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await server.wait_closed()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._relay(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                upstream, down = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            except OSError:
                writer.close()
                return
            back = asyncio.create_task(self._answer(upstream, writer))
            try:
                while data := await reader.read(65_536):
                    down.write(data)
                    await down.drain()
            finally:
                back.cancel()
                await asyncio.gather(back, return_exceptions=True)
                for end in (down, writer):
                    end.close()

    async def _answer(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await upstream.read(self.piece_bytes or 65_536):
                await self.answering.wait()
                writer.write(data)
                await writer.drain()
                self.forwarded_bytes += len(data)
                if self.piece_bytes is not None:
                    await asyncio.sleep(0)
        writer.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """Debian's redis-server; a test that needs it is skipped without it, but fails under CI=true."""
    binary = shutil.which("redis-server")
    if binary is None:
        message = "Debian's redis-server is not installed: apt-get install redis-server"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return binary


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


NewServer = Callable[..., Server]


@contextlib.contextmanager
def new_servers(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewServer]:
    made: list[Server] = []

    def make(*lines: str, sentinel: bool = False, tls: Certificates | None = None, start: bool = True) -> Server:
        quiet = () if sentinel else ('save ""', "repl-diskless-sync-delay 0")
        server = Server(binary, tmp_path_factory.mktemp("server"), (*quiet, *lines), sentinel=sentinel, tls=tls)
        made.append(server)
        if start:
            server.start()
        return server

    try:
        yield make
    finally:
        for server in made:
            server.kill()


@pytest.fixture(scope="module")
def shared_servers(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewServer]:
    """Makes servers that live as long as the module's tests."""
    with new_servers(redis_binary, tmp_path_factory) as make:
        yield make


@pytest.fixture
def new_server(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewServer]:
    """Makes servers for one test: lines of configuration, whether it is a Sentinel, its certificates."""
    with new_servers(redis_binary, tmp_path_factory) as make:
        yield make


def make_cluster(new: NewServer, *, masters: int = 3, replicas: int = 0, tls: Certificates | None = None) -> Cluster:
    def node() -> Server:
        acl = f"user cache on >word ~* {STORE_RIGHTS} {CLUSTER_RIGHTS}"
        bus = [f"cluster-port {free_port()}", "cluster-node-timeout 1000", *(["tls-cluster yes"] if tls else [])]
        return new("cluster-enabled yes", *bus, acl, tls=tls)

    return Cluster([node() for _ in range(masters)], [node() for _ in range(replicas)])


def make_sentinel_group(new: NewServer) -> tuple[Server, Server, Server]:
    """A master, its replica, and one Sentinel that watches both as `main`."""
    master = new()
    replica = new(f"replicaof 127.0.0.1 {master.port}")
    watch = (f"sentinel monitor main 127.0.0.1 {master.port} 1", "sentinel down-after-milliseconds main 500")
    sentinel = new(*watch, "sentinel failover-timeout main 3000", sentinel=True)
    with sentinel.admin() as admin:

        def knows_a_good_replica() -> bool:
            known: Any = admin.sentinel_slaves("main")
            return [state["master-link-status"] for state in known] == ["ok"]

        eventually(knows_a_good_replica, "the Sentinel's view")
    return master, replica, sentinel


@pytest.fixture(scope="module")
def cluster(shared_servers: NewServer) -> Cluster:
    """Three masters, with the user that the documentation describes."""
    return make_cluster(shared_servers)


@pytest.fixture
def new_cluster(new_server: NewServer) -> Callable[..., Cluster]:
    """Makes a cluster for one test."""
    return lambda **options: make_cluster(new_server, **options)


@pytest.fixture(scope="module")
def sentinel_group(shared_servers: NewServer) -> tuple[Server, Server, Server]:
    """A master, its replica and a Sentinel."""
    return make_sentinel_group(shared_servers)


@pytest.fixture
def new_sentinel_group(new_server: NewServer) -> tuple[Server, Server, Server]:
    """The same for one test, which may end them."""
    return make_sentinel_group(new_server)


@pytest.fixture(scope="module")
def tls_server(shared_servers: NewServer, certificates: Certificates) -> Server:
    """A server that only speaks TLS and asks for certificates, with the user that the documentation describes."""
    return shared_servers(f"user cache on >word ~* {STORE_RIGHTS}", tls=certificates)


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    """A running proxy that leads nowhere yet."""
    made = Proxy()
    async with made.running():
        yield made
