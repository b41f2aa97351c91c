"""Who may speak over TCP: a CURVE key pair a process, and a list of the public keys that may.

API
    ``open_keyring(security, id, role) -> Keyring | None``   None: TCP is not encrypted
    ``Keyring.identity(public)``     who owns a key that a peer has proven to hold, if listed
    ``Keyring.server_key(server)``   the key that whoever listens there must prove to hold
    ``answer_zap(request, keyring)`` what ZeroMQ asks about each connection (its RFC 27, ZAP)
    ``write_keys(directory, pairs)`` what ``moemesh keygen`` does

``ID.key`` (mode 0600) holds one process's pair, ``allow.toml`` the public keys with name and role.
Both are TOML with keys in ZeroMQ's text form (Z85, 40 characters). The list is read again when it
has changed: a key that is added is let in, one that is taken out is no longer listened to.
"""

from __future__ import annotations

import base64
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import structlog

from mesh.inbox import LinkError
from mesh.messages import Role
from mesh.settings import SecuritySettings

ALLOW_FILE = "allow.toml"
_Z85 = re.compile(r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_TO_Z85 = bytes.maketrans(
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~",
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#",
)
"""From the alphabet of ``base64.b85encode`` (RFC 1924) to that of ZeroMQ's RFC 32."""
_RAW_KEY_BYTES = 32
T = TypeVar("T")


class CurveError(LinkError):
    """Keys are missing, unsafe or wrong; the message names file and setting, never a secret."""


class KeyExists(CurveError):
    """A process of that name has a key already; nothing was written."""


class Identity(NamedTuple):
    """Whom a public key belongs to."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One process's keys, as ``ID.key`` holds them."""

    name: str
    role: Role
    public: str
    secret: str = field(repr=False)


class _Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role
    public: str


class AllowList:
    """The public keys of a mesh."""

    def __init__(self, path: Path) -> None:
        """Read the file; raises ``CurveError``."""
        self.path = path
        self._log = structlog.get_logger("mesh.curve").bind(file=str(path))
        self._stamp = _stamp(path)
        self._by_name: dict[str, _Allowed] = {}
        self._by_key: dict[str, Identity] = {}
        self._take(_read_allowed(path))

    def identity(self, public: str) -> Identity | None:
        """Whose key it is; None when it is not listed."""
        self._refresh()
        return self._by_key.get(public)

    def named(self, name: str) -> Identity | None:
        """Who ``name`` is now; None when it is not listed (any more)."""
        self._refresh()
        entry = self._by_name.get(name)
        return None if entry is None else Identity(name, entry.role)

    def key_of(self, server: str) -> str:
        """The key of the process of that name, or of the only one of that role; else empty."""
        self._refresh()
        if server in self._by_name:
            return self._by_name[server].public
        keys = [entry.public for entry in self._by_name.values() if entry.role == server]
        return keys[0] if len(keys) == 1 else ""

    def _take(self, entries: Mapping[str, _Allowed]) -> None:
        self._by_name = dict(entries)
        self._by_key = {entry.public: Identity(name, entry.role) for name, entry in entries.items()}

    def _refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be used leaves what was."""
        stamp = _stamp(self.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(_read_allowed(self.path))
        except CurveError as error:
            self._log.warning("curve.allow_list_unusable", error=str(error))
        else:
            self._log.info("curve.allow_list_read", keys=len(self._by_key))


@dataclass(frozen=True, slots=True)
class Keyring:
    """One process's keys and those of its peers."""

    own: KeyPair
    allowed: AllowList

    def identity(self, public: str) -> Identity | None:
        return self.allowed.identity(public)

    def named(self, name: str) -> Identity | None:
        return self.allowed.named(name)

    def server_key(self, server: str) -> str:
        """``server``: a name, or a role that one process only has. Raises ``CurveError``."""
        key = self.allowed.key_of(server)
        if not key:
            raise CurveError(
                f"{self.allowed.path}: no key of {server!r}, neither as a name nor as a role that "
                "one key only has"
            )
        return key


def open_keyring(security: SecuritySettings, id: str, role: Role) -> Keyring | None:  # noqa: A002
    """The keys of process ``id``; None when none are configured. Raises ``CurveError``."""
    directory = security.curve_dir
    if not (directory or security.key_file or security.allow_file):
        return None
    for setting in ("key_file", "allow_file"):
        if not directory and not getattr(security, setting):
            raise CurveError(f"expected security.{setting}, or security.curve_dir")
    allowed = AllowList(Path(security.allow_file or Path(directory, ALLOW_FILE)))
    path = Path(security.key_file or Path(directory, f"{id}.key"))
    own = _read_key(path)
    if (own.name, own.role) != (id, role):
        raise CurveError(f"{path} is the key of {own.role} {own.name}, expected {role} {id}")
    if allowed.identity(own.public) != Identity(id, role):
        raise CurveError(
            f"{allowed.path} does not list the key of {path} as {id}, role {role}: nobody would "
            "take it"
        )
    return Keyring(own, allowed)


class Verdict(NamedTuple):
    """``frames``: the answer for ZeroMQ. ``reason``: why the peer is turned away, or empty."""

    frames: list[bytes]
    reason: str
    address: str


def answer_zap(request: Sequence[bytes], keyring: Keyring) -> Verdict:
    """Whether a connection is let in. ``request``: ZAP's frames from the version on; the answer
    names the peer, which its messages then carry as ``User-Id``.
    """
    request_id = request[1] if len(request) > 1 else b""
    address = request[3].decode(errors="replace") if len(request) > 3 else ""
    identity, reason = None, "no CURVE key"
    if len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == _RAW_KEY_BYTES:
        public = z85(request[6])
        identity = keyring.identity(public)
        reason = f"{keyring.allowed.path} does not list the key {public}"
    if identity is None:
        return Verdict([b"1.0", request_id, b"400", b"refused", b"", b""], reason, address)
    name = identity.name.encode()
    return Verdict([b"1.0", request_id, b"200", b"OK", name, b""], "", address)


def z85(raw: bytes) -> str:
    """ZeroMQ's text form of a key."""
    return base64.b85encode(raw).translate(_TO_Z85).decode()


# ---------------------------------------------------------------- files


def write_keys(directory: Path, pairs: Iterable[KeyPair], *, replace: bool = False) -> None:
    """Write ``NAME.key`` for each pair and add them all to ``allow.toml``.

    Nothing is written when one of the names has a key already, unless ``replace``. Raises
    ``KeyExists``, ``CurveError``.
    """
    pairs = list(pairs)
    allow = directory / ALLOW_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        entries = _read_allowed(allow) if allow.exists() else {}
        for pair in pairs:
            if not replace and ((directory / f"{pair.name}.key").exists() or pair.name in entries):
                raise KeyExists(f"{directory} has a key of {pair.name} already")
        entries |= {pair.name: _Allowed(pair.role, pair.public) for pair in pairs}
        for pair in pairs:
            _write(
                directory / f"{pair.name}.key",
                f"# Secret: for the process {pair.name} alone.\n"
                f'name = "{pair.name}"\nrole = "{pair.role}"\n'
                f'public = "{pair.public}"\nsecret = "{pair.secret}"\n',
                0o600,
            )
        listed = "".join(
            f'\n[{name}]\nrole = "{entry.role}"\npublic = "{entry.public}"\n'
            for name, entry in sorted(entries.items())
        )
        _write(
            allow, f"# Whose TCP connections this mesh takes. Public keys only.\n{listed}", 0o644
        )
    except OSError as error:
        raise CurveError(f"{error.filename or directory}: {error.strerror}") from None


def _write(path: Path, text: str, mode: int) -> None:
    """Replace a file at once; it never has a wider mode than ``mode``."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    new.replace(path)


def _read_key(path: Path) -> KeyPair:
    table = _read_toml(path, forbidden_mode=0o077, advice="chmod 600 it")
    key = _convert(path, table, KeyPair)
    for name in ("public", "secret"):
        if not _Z85.fullmatch(getattr(key, name)):
            raise CurveError(f"{path}: {name} is no key; expected 40 characters of Z85")
    return key


def _read_allowed(path: Path) -> dict[str, _Allowed]:
    table = _read_toml(path, forbidden_mode=0o022, advice="chmod go-w it")
    entries = _convert(path, table, dict[str, _Allowed])
    owners: dict[str, str] = {}
    for name, entry in entries.items():
        if not _Z85.fullmatch(entry.public):
            raise CurveError(f"{path}: {name}.public is no key; expected 40 characters of Z85")
        if entry.public in owners:
            raise CurveError(f"{path}: {owners[entry.public]} and {name} have the same key")
        owners[entry.public] = name
    return entries


def _read_toml(path: Path, *, forbidden_mode: int, advice: str) -> dict[str, Any]:
    """A file that only its owner, we or root, could have written (or, by its mode, read)."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in {0, os.getuid()}:
                raise CurveError(f"{path} belongs to uid {found.st_uid}, not to {os.getuid()}")
            if stat.S_IMODE(found.st_mode) & forbidden_mode:
                mode = stat.S_IMODE(found.st_mode)
                raise CurveError(f"{path} is open to others (mode {mode:o}): {advice}")
            return tomllib.load(file)
    except OSError as error:
        raise CurveError(
            f"{path} cannot be read: {error.strerror} (`moemesh keygen` makes such files)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CurveError(f"{path} is not TOML: {error}") from None


def _convert(path: Path, table: object, type_: type[T]) -> T:
    try:
        return msgspec.convert(table, type_)
    except msgspec.ValidationError as error:
        raise CurveError(f"{path}: {error}") from None


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size)
