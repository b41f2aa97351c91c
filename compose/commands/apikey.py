"""``moemesh apikey``: make an API key, and the lines of the file that let it in."""

from __future__ import annotations

import hashlib
import secrets
import sys
from typing import Annotated

from cyclopts import Parameter

from compose.options import UsageError
from mesh.config import API_KEY_NAME, API_KEY_NAME_EXPECTED

_KEY_BYTES = 32


def apikey(
    name: Annotated[str, Parameter(help="Whose key it is: names the tenant in logs.")],
    /,
) -> int:
    """Print a new key (to standard error, once) and its lines for ``gateway.api_keys_file`` or
    ``gateway.admin_key_file`` (to standard output).
    """
    if not API_KEY_NAME.fullmatch(name):
        raise UsageError(f"{name!r}: {API_KEY_NAME_EXPECTED}")
    key = f"mm-{secrets.token_urlsafe(_KEY_BYTES)}"
    print(f"The key of {name}, which is kept nowhere:\n\n    {key}\n", file=sys.stderr)
    sys.stderr.flush()
    digest = hashlib.sha256(key.encode("ascii")).hexdigest()
    print(f'[[key]]\nname = "{name}"\nsha256 = "{digest}"')
    return 0
