"""From settings, files and environment to who may come in, and by what transport."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from gateway.api.guard import Guard
from gateway.keys import Keyring, KeysError, parse_keys, read_keys
from gateway.tenants import ANONYMOUS, Tenant
from mesh.addresses import is_loopback
from mesh.config import ADMIN_KEY_VARIABLE, API_KEYS_VARIABLE
from mesh.exposure import exposure_fault
from mesh.settings import GatewaySettings
from mesh.supervise import CannotServe


def guard(settings: GatewaySettings, environ: Mapping[str, str]) -> Guard:
    """Whom the gateway lets in. Raises ``CannotServe`` for keys that cannot be used, and for a
    host beyond loopback that would let in everyone.
    """
    if fault := exposure_fault(settings, environ):
        raise CannotServe(fault)
    keys = _ring("gateway.api_keys_file", settings.api_keys_file, API_KEYS_VARIABLE, environ)
    admins = _ring("gateway.admin_key_file", settings.admin_key_file, ADMIN_KEY_VARIABLE, environ)
    return Guard(
        keys=keys,
        admins=admins,
        anonymous=Tenant(ANONYMOUS) if settings.allow_anonymous or not keys else None,
        loopback=is_loopback(settings.host),
    )


def _ring(setting: str, path: str, variable: str, environ: Mapping[str, str]) -> Keyring:
    text = environ.get(variable, "")
    try:
        keys = read_keys(path) if path else []
        if text:
            keys += parse_keys(text, variable)
        return Keyring(keys)
    except KeysError as error:
        raise CannotServe(f"{setting}, {variable}: {error}") from None


def tls_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the configured certificate; None where none is configured.

    Raises ``CannotServe`` naming the file at fault.
    """
    if not settings.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for setting, path in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise CannotServe(
                f"gateway.{setting}: {path} cannot be read: {error.strerror}"
            ) from None
    try:
        # Without a password an encrypted key would be asked for on the terminal.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (ssl.SSLError, ValueError):
        raise CannotServe(
            f"gateway.tls_cert = {settings.tls_cert!r} and gateway.tls_key = "
            f"{settings.tls_key!r}: expected a certificate and its own private key, in PEM and "
            "not encrypted"
        ) from None
    return context
