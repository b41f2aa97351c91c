"""Where this process is: how other hosts reach it, and whether another process is on the same one.

API
    ``host_id(settings) -> str``              equal for processes that can share memory
    ``listen_host(settings) -> str``          the address of ``network.listen``; empty: none
    ``listen_address(settings) -> str``       the same for a link, with the ports that it may take
    ``planner_listen(settings, address)``     where the planner listens for who connects to that
    ``advertised(settings, bound) -> str``    what others are told of an address as bound

Errors: ``HostError`` for a name or interface that has no address.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
from pathlib import Path
from struct import pack

from mesh.addresses import TCP, WILDCARDS, join
from mesh.inbox import LinkError
from mesh.settings import Settings

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SIOCGIFADDR = 0x8915
"""netdevice(7): an interface's IPv4 address, in bytes 20 to 24 of its ``struct ifreq``."""


class HostError(LinkError):
    """``network.listen`` names nothing that this host can listen on."""


def host_id(settings: Settings) -> str:
    """``network.host_id``, else what the kernel drew when it booted. It says who may try to share
    memory; a lane's handshake over a Unix socket shows whether they can.
    """
    if settings.network.host_id:
        return settings.network.host_id
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def listen_host(settings: Settings) -> str:
    """As a number, which every kind of socket takes. Raises ``HostError``."""
    name = settings.network.listen
    if not name or name in WILDCARDS:
        return name.replace("*", "0.0.0.0")  # noqa: S104 - as configured
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(name))
    if name in (interface for _, interface in socket.if_nameindex()):
        return _address_of(name)
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostError(
            f"network.listen = {name!r}: neither an address, nor an interface, nor a host: {error}"
        ) from None
    return str(found[0][4][0])


def listen_address(settings: Settings) -> str:
    """For a link that others connect to; empty without ``network.listen``. Raises ``HostError``."""
    host = listen_host(settings)
    return join(host, settings.network.ports or 0) if host else ""


def planner_listen(settings: Settings, address: str) -> str:
    """Where the planner listens for members that connect to ``address``. Raises ``HostError``."""
    host = listen_host(settings)
    if not host or not address.startswith(TCP):
        return address
    return join(host, address.rpartition(":")[2])


def advertised(settings: Settings, bound: str) -> str:
    """What others connect to, for an address at which a socket of ours is bound."""
    if not settings.network.advertise or not bound.startswith(TCP):
        return bound
    return join(settings.network.advertise, bound.rpartition(":")[2])


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        try:
            found = fcntl.ioctl(link.fileno(), _SIOCGIFADDR, pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise HostError(
                f"network.listen = {interface!r}: the interface has no IPv4 address: "
                f"{error.strerror}"
            ) from None
    return socket.inet_ntoa(found[20:24])
