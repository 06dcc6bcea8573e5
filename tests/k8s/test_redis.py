"""Real Redis servers, started as the manifests start them: configuration, users, probes, TLS."""

import contextlib
import datetime
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deploy.label_cache.opening import open_store
from deploy.settings import Settings

pytestmark = pytest.mark.redis

PATIENCE_S = 60.0  # of the machine, whose cores are shared; no promise of ours


@dataclass(frozen=True)
class Server:
    """A running server of a StatefulSet: its port, its Secret's values, its folder, and the command of its probes."""

    port: int
    secret: dict[str, str]
    folder: Path
    probe: str
    tls: bool

    def client(self, **options: Any) -> "redis.Redis":
        """A client; over TLS where the server wants it."""
        tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": str(self.folder / "tls" / "ca.crt")} if self.tls else {}
        return redis.Redis(host="localhost", port=self.port, **tls, **options)

    def probed(self) -> bool:
        """Whether the command of the probes finds it well."""
        return subprocess.run(["/bin/sh", "-c", self.probe], capture_output=True).returncode == 0


@contextlib.contextmanager
def running(folder: Path, manifests: Any, where: str, secret: dict[str, str]) -> Iterator[Server]:
    """The server of a StatefulSet with its own command and configuration, in a folder instead of a container."""
    if shutil.which("redis-server") is None:
        assert os.environ.get("CI") != "true", "redis-server is absent, and CI must not skip what needs it"
        pytest.skip("redis-server is absent")
    for name, value in secret.items():
        (folder / "auth").mkdir(exist_ok=True)
        (folder / "auth" / name).write_text(value)
    make_certificate(folder / "tls")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pod = manifests.one("StatefulSet", where)["spec"]["template"]["spec"]
    (name,) = (volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "config")
    config = manifests.one("ConfigMap", name)["data"]["redis.conf"]
    config = config.replace("/etc/redis", str(folder)).replace("dir /data", f"dir {folder}")
    config = config.replace("port 6379", f"port {port}").replace("bind * -::*", "bind 127.0.0.1")
    (folder / "redis.conf").write_text(config)
    (container,) = pod["containers"]
    command = [word.replace("/etc/redis", str(folder)).replace("6379", str(port)) for word in container["command"]]
    words = container["readinessProbe"]["exec"]["command"][2].replace("/etc/redis", str(folder))
    server = Server(
        port, secret, folder, words.replace("redis-cli", f"redis-cli -p {port}"), "--tls-port" in container["command"]
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not server.probed():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)  # a condition of another process, asked for again
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def make_certificate(folder: Path) -> None:
    """A throw-away certificate for localhost that is its own authority, as the Secret label-cache-tls has it."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / "tls.crt").write_bytes(pem)
    (folder / "ca.crt").write_bytes(pem)
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


@pytest.fixture
def label_cache(manifests: Any, load_script: Callable[[str], ModuleType], tmp_path: Path) -> Iterator[Server]:
    """The label cache of each overlay, with the Secret that k8s/make_secrets.py makes."""
    secret = load_script("make_secrets.py").label_cache_secret()["stringData"]
    with running(tmp_path, manifests, "label-cache", secret) as server:
        yield server


@pytest.fixture
def gcs_redis(manifests: Any, load_script: Callable[[str], ModuleType], tmp_path: Path) -> Iterator[Server]:
    """Ray's own Redis of each overlay, likewise."""
    secret = load_script("make_secrets.py").gcs_secret()["stringData"]
    with running(tmp_path, manifests, "gcs-redis", secret) as server:
        yield server


def test_nobody_gets_in_without_a_password(label_cache: Server) -> None:
    """The default user is off, so a connection without a name may not even ping."""
    with label_cache.client() as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()


def test_the_prober_may_ping_and_no_more(label_cache: Server) -> None:
    """Who got hold of the probe's password reads and writes nothing."""
    with label_cache.client(username="probe", password=label_cache.secret["probe-password"]) as prober:
        assert prober.ping()
        for forbidden in (("GET", "tokenalign:a"), ("SET", "tokenalign:a", "1"), ("INFO",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                prober.execute_command(*forbidden)


def test_the_probe_sees_a_wrong_password(label_cache: Server) -> None:
    """A server that nobody can log in to is not ready."""
    (label_cache.folder / "auth" / "probe-password").write_text("wrong")
    assert not label_cache.probed()


def test_the_application_may_not_administer(label_cache: Server) -> None:
    """Nor touch keys of others."""
    with label_cache.client(username="tokenalign", password=label_cache.secret["password"]) as application:
        assert application.ping()
        for forbidden in (("SET", "a", "1"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*"), ("ACL", "LIST")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                application.execute_command(*forbidden)


async def test_the_store_works_with_these_rights(manifests: Any, label_cache: Server) -> None:
    """tokenalign's own store, opened as the overlay's settings say, does each thing that the cache may ask of it."""
    (app,) = manifests.serve_config()["applications"]
    cache = dict(app["args"]["label_cache"])
    cache["url"] = cache["url"].replace("label-cache:6379", f"localhost:{label_cache.port}")
    cache["password"] = {"file": str(label_cache.folder / "auth" / "password")}
    cache["signing_key"] = {"file": str(label_cache.folder / "auth" / "signing-key")}
    if label_cache.tls:
        cache["tls_ca_file"] = str(label_cache.folder / "tls" / "ca.crt")
    assert cache["url"].startswith("rediss:") == label_cache.tls
    store = open_store(Settings.parse({"label_cache": cache}).label_cache)
    assert store is not None
    try:
        await store.ping()
        await store.set_many({"tokenalign:a": b"1", "tokenalign:b": b"2"}, 60)
        assert await store.get_many(["tokenalign:a", "tokenalign:b", "tokenalign:c"]) == [b"1", b"2", None]
        assert await store.touch_many(["tokenalign:a", "tokenalign:c"], 60) == [True, False]
        assert await store.set_if_absent_many({"tokenalign:a": b"x", "tokenalign:d": b"y"}, 60) == [False, True]
        assert await store.delete_if_equal_many({"tokenalign:a": b"x", "tokenalign:d": b"y"}) == [False, True]
        await store.set_forever("tokenalign:set", b"definition")
        assert await store.delete("tokenalign:set")
    finally:
        await store.close()


def test_what_is_written_outlives_the_server(
    manifests: Any, load_script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """A label set is on disk, and there when the server comes back with the same volume."""
    secret = load_script("make_secrets.py").label_cache_secret()["stringData"]
    login = {"username": "tokenalign", "password": secret["password"]}
    with running(tmp_path, manifests, "label-cache", secret) as server, server.client(**login) as client:
        client.set("tokenalign:data:set:1", b"definition")
    shutil.rmtree(tmp_path / "tls")
    with running(tmp_path, manifests, "label-cache", secret) as server, server.client(**login) as client:
        assert client.get("tokenalign:data:set:1") == b"definition"


def test_ray_has_rights_enough_and_no_more(gcs_redis: Server) -> None:
    """What Ray's head, and the job that cleans up after it, were seen to ask is allowed, in Ray's own keys alone."""
    login = {"username": gcs_redis.secret["username"], "password": gcs_redis.secret["password"]}
    with gcs_redis.client(**login) as ray:
        assert ray.ping()
        assert ray.info()
        assert ray.delete("DUMMY") == 0
        table = "RAY0123@NODE"
        assert ray.hset(table, "a", "1") == 1
        assert ray.hsetnx(table, "b", "1")
        assert ray.hexists(table, "a")
        assert ray.hget(table, "a") == b"1"
        assert ray.hscan(table)[1]
        assert ray.hdel(table, "a") == 1
        assert ray.incrby("RAY0123@JobCounter", 1) == 1
        assert ray.keys("RAY0123@*")
        assert ray.scan(match="RAY0123@*")
        assert ray.delete(table) == 1
        for forbidden in (("SET", "tokenalign:a", "1"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("SHUTDOWN",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                ray.execute_command(*forbidden)
