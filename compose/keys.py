"""Before a mesh starts: does each of its processes have the key that TCP needs."""

from __future__ import annotations

from collections.abc import Sequence

from compose.options import UsageError
from compose.processes import ADMIN, ProcessSpec
from mesh.addresses import TCP
from mesh.curve import CurveError, open_keyring
from mesh.rundir import broadcast_address, planner_address
from mesh.settings import Settings


def check_keys(settings: Settings, specs: Sequence[ProcessSpec]) -> None:
    """Raises ``UsageError`` for the first process, or this command, whose key will not do."""
    addresses = (
        planner_address(settings),
        broadcast_address(settings),
        TCP if settings.network.listen else "",
    )
    if not any(address.startswith(TCP) for address in addresses):
        return
    try:
        for spec in specs:
            open_keyring(settings.security, spec.id, spec.role)
        open_keyring(settings.security, ADMIN, "admin")
    except CurveError as error:
        raise UsageError(str(error)) from None
