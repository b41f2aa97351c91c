"""``moemesh scale``: more or fewer processes of a role, while the mesh serves."""

from __future__ import annotations

import asyncio
from typing import Annotated

from cyclopts import Parameter

from compose.control import Scale, order
from compose.fleet import SCALED
from compose.options import Source, UsageError

_EXPECTED = "expected ROLE=COUNT, such as experts=4 or routers=2; roles: " + ", ".join(
    f"{role}s" for role in SCALED
)


def scale(
    *counts: Annotated[str, Parameter(help="ROLE=COUNT, such as experts=4 routers=2.")],
    source: Source = Source(),  # noqa: B008 (frozen)
) -> int:
    """Have so many processes of a role, for as long as the mesh of `moemesh up` lasts. Returns once
    new ones are ready, and those that leave have handed over what they had and ended.
    """
    asyncio.run(order(source.effective().settings, Scale(counts=_parsed(counts)), print))
    return 0


def _parsed(counts: tuple[str, ...]) -> dict[str, int]:
    if not counts:
        raise UsageError(f"scale: {_EXPECTED}")
    parsed: dict[str, int] = {}
    for item in counts:
        name, _, number = item.partition("=")
        role = next((role for role in SCALED if name == f"{role}s"), None)
        if role is None or not number.isdigit():
            raise UsageError(f"{item}: {_EXPECTED}")
        parsed[role] = int(number)
    return parsed
