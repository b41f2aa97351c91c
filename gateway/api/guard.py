"""Who may ask for what: API keys for the API, an admin key for ``/admin``, nothing for probes.

Pure but for the tenants' own state.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from starlette.types import Scope

from gateway.errors import Forbidden, WrongKey
from gateway.keys import Keyring
from gateway.tenants import Tenant
from mesh.addresses import is_loopback

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Answered without a key: they carry numbers and states, and are asked by machines without one."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_BEARER = {"WWW-Authenticate": "Bearer"}
_ADMIN = {"WWW-Authenticate": 'Bearer, Basic realm="moemesh admin", charset="UTF-8"'}


@dataclass(frozen=True, kw_only=True)
class Guard:
    """``keys``: of clients, ``admins``: of administrators; either may be empty.

    ``anonymous``: the tenant of clients without a key, None where each needs one. ``loopback``:
    whether only this machine reaches the gateway.
    """

    keys: Keyring
    admins: Keyring
    anonymous: Tenant | None
    loopback: bool

    @property
    def one_tenant(self) -> bool:
        """Whether all clients are one."""
        return not self.keys

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """All tenants there are."""
        return self.keys.tenants + ((self.anonymous,) if self.anonymous else ())

    def check(self, scope: Scope) -> Tenant | None:
        """Whose request this is; None for a path that needs no tenant.

        Raises ``WrongKey`` or ``Forbidden``.
        """
        path: str = scope["path"]
        if path in OPEN_PATHS:
            return None
        if path == "/admin" or path.startswith("/admin/"):
            return self._administrator(scope)
        key = _bearer(_header(scope, b"authorization"))
        if not self.keys:
            return self.anonymous  # what clients send as a key then means nothing
        if key is None:
            if self.anonymous is None:
                raise WrongKey(
                    "No API key was sent: expected the header Authorization: Bearer KEY.",
                    headers=_BEARER,
                )
            return self.anonymous
        tenant = self.keys.find(key)
        if tenant is None:
            raise WrongKey("The API key is not known here.", headers=_BEARER)
        return tenant

    def _administrator(self, scope: Scope) -> Tenant | None:
        self._check_origin(scope)
        if not self.admins:
            if not self.loopback:
                raise Forbidden(
                    "/admin is answered on a loopback host only until gateway.admin_key_file or "
                    "MOEMESH_ADMIN_KEY is set."
                )
            # A page elsewhere can have its own host's name point here.
            if not is_loopback(_host_name(_header(scope, b"host"))):
                raise Forbidden(
                    "/admin is answered under a loopback name only until gateway.admin_key_file "
                    "or MOEMESH_ADMIN_KEY is set."
                )
            return None
        sent = _header(scope, b"authorization")
        key = _bearer(sent) or _password(sent)
        if key is None:
            raise WrongKey(
                "No admin key was sent: expected the header Authorization: Bearer KEY.",
                headers=_ADMIN,
            )
        admin = self.admins.find(key)
        if admin is None:
            if self.keys.find(key) is not None:
                raise Forbidden("This API key is no admin key.")
            raise WrongKey("The admin key is not known here.", headers=_ADMIN)
        return admin

    def _check_origin(self, scope: Scope) -> None:
        """A browser sends the key it remembers with whatever any page asks it to send."""
        origin = _header(scope, b"origin")
        if scope["method"] in _SAFE or origin is None:
            return
        if origin.partition(b"://")[2].lower() != (_header(scope, b"host") or b"").lower():
            raise Forbidden("/admin takes no request from another site's page.")


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def _host_name(host: bytes | None) -> str:
    """Without the port: ``name:80``, ``[::1]:80``."""
    text = (host or b"").decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def _bearer(value: bytes | None) -> bytes | None:
    scheme, _, key = (value or b"").partition(b" ")
    return key.strip() or None if scheme.lower() == b"bearer" else None


def _password(value: bytes | None) -> bytes | None:
    """Of HTTP's Basic scheme (RFC 7617), which browsers ask their users for."""
    scheme, _, encoded = (value or b"").partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2] or None
    except binascii.Error:
        return None
