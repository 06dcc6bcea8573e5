"""Which hosts are this machine, and reached by nobody else."""

from functools import lru_cache
from ipaddress import ip_address


@lru_cache(maxsize=64)  # asked twice for each request, and reading an address takes longer than all else of the gate
def is_loopback(host: str) -> bool:
    """Whether a name or an address, with the brackets of one of IPv6 or without, is this machine alone."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(header: str) -> str:
    """The host of a `Host` header, without its port."""
    host, colon, port = header.rpartition(":")
    return host if colon and port.isdecimal() else header
