"""Who can reach the gateway, and whether that needs an API key. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from mesh.addresses import is_loopback
from mesh.config import API_KEYS_VARIABLE
from mesh.settings import GatewaySettings


def keys_required(settings: GatewaySettings, environ: Mapping[str, str]) -> bool:
    """Whether each client must have an API key."""
    return _has_keys(settings, environ) and not settings.allow_anonymous


def _has_keys(settings: GatewaySettings, environ: Mapping[str, str]) -> bool:
    return bool(settings.api_keys_file or environ.get(API_KEYS_VARIABLE))


def exposure_fault(settings: GatewaySettings, environ: Mapping[str, str]) -> str:
    """Why the gateway must not listen where it is told to, in words; empty when it may."""
    if _has_keys(settings, environ) or settings.allow_anonymous or is_loopback(settings.host):
        return ""
    return (
        f"gateway.host = {settings.host!r} is reached from other machines and no client needs a "
        f"key: set gateway.api_keys_file or {API_KEYS_VARIABLE} (`moemesh apikey` makes keys), or "
        "gateway.allow_anonymous = true to let anyone in"
    )
