"""API keys: who presents one, and the file and variables that say which are good.

A file holds hashes only, so that reading it lets nobody in:

    [[key]]
    name = "team-a"
    sha256 = "9f86d081..."        # of the key, in hexadecimal
    max_concurrent = 8            # these four may be left out
    requests_per_minute = 60
    tokens_per_minute = 100000
    weight = 2.0

Plain SHA-256 is enough for keys of 32 random bytes, as ``moemesh apikey`` makes them: there is
nothing to guess. It would not be for passwords.

No message says what a key or its hash is: somebody may have put the one in place of the other.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gateway.tenants import Limits, Tenant
from mesh.config import API_KEY_NAME, API_KEY_NAME_EXPECTED

MIN_KEY_CHARACTERS = 16
_DIGEST = re.compile("[0-9a-fA-F]{64}")
_PAIR = re.compile(rf"(?:(?P<name>{API_KEY_NAME.pattern})=)?(?P<key>[\x21-\x2b\x2d-\x7e]+)")
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1000.0


class KeysError(ValueError):
    """Keys that cannot be used; the gateway does not start. The text names the place."""


class _Entry(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    sha256: str


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: list[_Entry]


class Keyring:
    """Known keys, and the tenant that each belongs to."""

    def __init__(self, keys: Iterable[tuple[bytes, Tenant]]) -> None:
        """``keys``: (SHA-256 of the key, tenant). Raises ``KeysError`` for a name or a key that
        is there twice.
        """
        self._keys = tuple(keys)
        names = [tenant.name for _, tenant in self._keys]
        for name in names:
            if names.count(name) > 1:
                raise KeysError(f"two keys are named {name!r}")
        if len({digest for digest, _ in self._keys}) < len(self._keys):
            raise KeysError("the same key is there twice")

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(tenant for _, tenant in self._keys)

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of ``key``. Takes as long for a wrong key as for a good one."""
        presented = hashlib.sha256(key).digest()
        found = None
        for digest, tenant in self._keys:
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found


def read_keys(path: str) -> list[tuple[bytes, Tenant]]:
    """The keys of a file; raises ``KeysError`` naming the file and the entry."""
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        entries = msgspec.convert(tables, _File).key
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise KeysError(f"{path}: {error}") from None
    except (ValueError, RecursionError):
        # The parser's message may quote the line.
        raise KeysError(f"{path} is not TOML") from None
    if not entries:
        raise KeysError(f"{path} has no [[key]]")
    found = []
    for i, entry in enumerate(entries):
        if fault := _fault(entry):
            raise KeysError(f"{path}: [[key]] number {i + 1}: {fault}")
        found.append((bytes.fromhex(entry.sha256), Tenant(entry.name, _limits(entry))))
    return found


def _fault(entry: _Entry) -> str:
    if not API_KEY_NAME.fullmatch(entry.name):
        return f"name: {API_KEY_NAME_EXPECTED}"
    if not _DIGEST.fullmatch(entry.sha256):
        return "sha256: expected 64 hexadecimal digits"
    for limit in ("max_concurrent", "requests_per_minute", "tokens_per_minute"):
        if getattr(entry, limit) < 0:
            return f"{limit}: expected 0 or more"
    if not _LEAST_WEIGHT <= entry.weight <= _MOST_WEIGHT:
        return f"weight: expected {_LEAST_WEIGHT:g} to {_MOST_WEIGHT:g}"
    return ""


def _limits(entry: _Entry) -> Limits:
    return Limits(**{name: getattr(entry, name) for name in Limits.__struct_fields__})


def parse_keys(text: str, variable: str) -> list[tuple[bytes, Tenant]]:
    """The keys in an environment variable: ``KEY`` or ``NAME=KEY``, separated by commas.

    Raises ``KeysError`` naming the variable and the place.
    """
    found = []
    for i, part in enumerate(text.split(",")):
        pair = _PAIR.fullmatch(part.strip())
        if pair is None or len(pair["key"]) < MIN_KEY_CHARACTERS:
            raise KeysError(
                f"{variable}: entry {i + 1}: expected KEY or NAME=KEY with a key of at least "
                f"{MIN_KEY_CHARACTERS} printable characters"
            )
        tenant = Tenant(pair["name"] or f"key-{i + 1}")
        found.append((hashlib.sha256(pair["key"].encode("ascii")).digest(), tenant))
    return found
