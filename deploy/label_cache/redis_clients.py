"""Clients of redis-py for each kind of address: one server, what Sentinels name as the master, a cluster."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

URL_FORMS = (
    "redis://host:port/db, unix:///path, redis+sentinel://host:port,host:port/service/db or "
    "redis+cluster://host:port,host:port; rediss… instead of redis… for TLS"
)
SENTINEL_PORT = 26_379
REDIS_PORT = 6_379

_MANY_HOSTS = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?P<hosts>[^/?#@]+)(/(?P<path>[^?#]*))?", re.ASCII
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:\s]+)(:(?P<port>\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """What a connection needs beside the URL.

    username, password: of the servers; sentinel_username, sentinel_password: of the Sentinels, which have their own
    tls_ca_file: certificates (PEM) of those who may have signed a server's; None takes the system's
    tls_cert_file, tls_key_file: our own certificate and its key (PEM), for servers that ask for one
    connect_timeout_s, read_timeout_s: of one attempt to connect, and of one answer
    retries: how often a command whose connection broke, or that was not answered, is sent again
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    connect_timeout_s: float = 0.25
    read_timeout_s: float = 0.5
    retries: int = 1

    def for_servers(self) -> dict[str, Any]:
        """Keywords for redis-py, without retries."""
        return self._timeouts() | _given({"username": self.username, "password": self.password})

    def for_sentinels(self) -> dict[str, Any]:
        """The same for Sentinels; not tried again, since another one is asked instead."""
        own = {"username": self.sentinel_username, "password": self.sentinel_password}
        return self._timeouts() | _given(own) | {"retry": Retry(NoBackoff(), 0)}

    def for_tls(self) -> dict[str, Any]:
        """Keywords for redis-py about certificates; the server's is always checked, its host name included."""
        files = {"ssl_ca_certs": self.tls_ca_file, "ssl_certfile": self.tls_cert_file, "ssl_keyfile": self.tls_key_file}
        return {name: str(path) for name, path in _given(files).items()}

    def retry(self) -> Retry:
        """A fresh policy, as each client changes its own."""
        return Retry(ExponentialWithJitterBackoff(cap=0.1, base=0.01), self.retries)

    def _timeouts(self) -> dict[str, Any]:
        return {
            "protocol": 2,  # one round trip less at connect than RESP3's HELLO, and nothing of RESP3 is used
            "socket_connect_timeout": self.connect_timeout_s,
            "socket_timeout": self.read_timeout_s,
        }


def open_client(url: str, options: ConnectionOptions) -> tuple[Redis | RedisCluster, Sentinel | None]:
    """The client of `url`, which connects at its first use, and the Sentinels that it asks, to be closed with it.

    Raises `ValueError` when the URL can't be used; the message doesn't repeat it, since it may hold a password.
    """
    try:
        many = _MANY_HOSTS.match(url)
        if many is None:
            return _one_server(url, options), None
        kind, tls = many["kind"], many["scheme"] == "rediss"
        if many.end() != len(url):
            raise ValueError(f"options after ? can't be given for a {kind}")  # noqa: TRY301  one place that explains
        hosts = _hosts(many["hosts"], SENTINEL_PORT if kind == "sentinel" else REDIS_PORT)
        if kind == "cluster":
            return _cluster(hosts, many["path"] or "", tls, options), None
        return _master(hosts, many["path"] or "", tls, options)
    except (TypeError, ValueError, exceptions.RedisError, exceptions.RedisClusterException) as error:
        scheme = url.partition("://")[0]
        raise ValueError(f"the store's URL of scheme {scheme!r} can't be used: {error}; give {URL_FORMS}") from error


def _one_server(url: str, options: ConnectionOptions) -> Redis:
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    twice = [
        name
        for name, in_url, given in (
            ("user", parts.username or query.get("username"), options.username),
            ("password", parts.password or query.get("password"), options.password),
        )
        if in_url and given is not None
    ]
    if twice:
        raise ValueError(f"the {' and the '.join(twice)} is both in it and beside it; leave out one")
    tls = options.for_tls() if parts.scheme == "rediss" else {}
    client = Redis.from_url(url, retry=options.retry(), **options.for_servers(), **tls)
    # Unknown options show only when a connection object is made, which would be the first request.
    client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # redis-py leaves it bare
    if client.get_encoder().decode_responses:  # type: ignore[no-untyped-call]  # redis-py leaves it bare
        raise ValueError("it sets decode_responses, but entries are bytes; remove that")
    return client


def _master(hosts: list[tuple[str, int]], path: str, tls: bool, options: ConnectionOptions) -> tuple[Redis, Sentinel]:
    service, _, db = path.partition("/")
    if not service or not (db or "0").isdecimal():
        raise ValueError("after its hosts it needs the service's name and, if not 0, the database's number")
    certificates = {"ssl": True, **options.for_tls()} if tls else {}
    asking = options.for_sentinels() | certificates
    sentinel = Sentinel(hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]  # redis-py leaves it bare
    client: Redis = sentinel.master_for(
        unquote(service), db=int(db or 0), retry=options.retry(), **options.for_servers(), **certificates
    )
    return client, sentinel


def _cluster(hosts: list[tuple[str, int]], path: str, tls: bool, options: ConnectionOptions) -> RedisCluster:
    if path not in ("", "0"):
        raise ValueError("a cluster has one database only; nothing may follow its hosts")
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in hosts],
        retry=options.retry(),
        ssl=tls,
        **options.for_servers(),
        **(options.for_tls() if tls else {}),
    )


def _hosts(text: str, default_port: int) -> list[tuple[str, int]]:
    hosts = []
    for word in text.split(","):
        found = _HOST.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is no host:port")
        hosts.append((found["host"].strip("[]"), int(found["port"] or default_port)))
    return hosts


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
