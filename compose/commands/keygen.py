"""``moemesh keygen``: make the keys by which the processes of a mesh know each other over TCP."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from compose.options import UsageError
from mesh.config import name_fault
from mesh.curve import ALLOW_FILE, CurveError, KeyExists, KeyPair, write_keys
from mesh.links import new_key_pair
from mesh.messages import Role

_ROLES: tuple[Role, ...] = typing.get_args(Role)


def keygen(
    *pairs: Annotated[
        str,
        Parameter(
            help=f"NAME ROLE of each process, as in `router-0 router`; roles: {', '.join(_ROLES)}. "
            "`admin admin` is for moemesh's own commands."
        ),
    ],
    out: Annotated[Path, Parameter(help="Where to write them; made if need be.")] = Path("keys"),
    replace: Annotated[
        bool, Parameter(negative=(), help="Make new keys for names that have one.")
    ] = False,
) -> int:
    """Write NAME.key for each process (secret, mode 0600) and list all public keys in allow.toml.

    Give the directory as security.curve_dir. A host needs the keys of its own processes only, and
    allow.toml. A running mesh takes changes of allow.toml at once; to take a key away, delete its
    lines there.
    """
    names = pairs[::2]
    if not pairs or len(pairs) % 2:
        raise UsageError("expected NAME ROLE, once for each process")
    made: list[KeyPair] = []
    for name, role in zip(names, pairs[1::2], strict=True):
        if fault := name_fault(name):
            raise UsageError(f"name {name!r}: {fault}")
        known = next((one for one in _ROLES if one == role), None)
        if known is None:
            raise UsageError(f"role {role!r} of {name}: expected one of {', '.join(_ROLES)}")
        if names.count(name) > 1:
            raise UsageError(f"name {name!r} is given twice")
        public, secret = new_key_pair()
        made.append(KeyPair(name, known, public, secret))
    try:
        write_keys(out, made, replace=replace)
    except KeyExists as error:
        raise UsageError(f"{error}; --replace makes a new one", exit_code=1) from None
    except CurveError as error:
        raise UsageError(str(error), exit_code=1) from None
    print(f"{out}: {', '.join(f'{pair.name}.key' for pair in made)}, {ALLOW_FILE}")
    return 0
