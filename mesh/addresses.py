"""Addresses: which are well formed, and which are reached from other machines. Pure."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

MAX_SOCKET_PATH_BYTES = 107
"""``sun_path`` of a Unix socket has 108 bytes, the last one zero (unix(7))."""
IPC = "ipc://"
TCP = "tcp://"


NEEDS_KEYS = (
    "security.curve_dir with keys (`moemesh keygen` makes them), or security.allow_insecure = "
    "true: whoever reaches this port could command the mesh"
)
"""What TCP beyond this machine needs."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``. A name other than
    ``localhost`` may mean any address.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


WILDCARDS = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - where they can be used is checked
"""Every address of a machine: to listen on, not to connect to."""


def join(host: str, port: int | str) -> str:
    """``tcp://HOST:PORT``; ``port`` may be a range, ``LOW-HIGH``."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def ports_of(text: str) -> range:
    """``LOW-HIGH`` or one port; nothing is any free port, 0. Raises ``ValueError``."""
    low, dash, high = text.partition("-")
    first = int(low or 0)
    last = int(high) if dash else first
    if not (low or not dash) or not 0 <= first <= last <= 65535 or (dash and not first):
        raise ValueError(text)
    return range(first, last + 1)


def leaves_host(address: str) -> bool:
    """Whether what is sent to ``address`` may pass a network: ``tcp://`` beyond loopback."""
    host, _, _ = address.removeprefix(TCP).rpartition(":")
    return address.startswith(TCP) and not is_loopback(host.strip("[]"))


def address_fault(address: str) -> str:
    """What is wrong with the form of an address, in words; empty when it can be used.

    Accepted: ``ipc:///absolute/path`` of at most 107 bytes, and ``tcp://HOST:PORT`` with a host
    that others can connect to.
    """
    if address.startswith(IPC):
        path = address.removeprefix(IPC)
        if not path.startswith("/"):
            return "expected an absolute path after ipc://"
        if (size := len(path.encode())) > MAX_SOCKET_PATH_BYTES:
            return f"the socket path has {size} bytes, expected at most {MAX_SOCKET_PATH_BYTES}"
        return ""
    if address.startswith(TCP):
        try:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            return "expected tcp://HOST:PORT"
        if not host or not port or parts.path:
            return "expected tcp://HOST:PORT"
        if host in WILDCARDS:
            return "expected a host that members connect to, not a wildcard"
        return ""
    return "expected ipc:///PATH or tcp://HOST:PORT"
