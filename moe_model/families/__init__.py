"""Model families: one small file each over the shared parts.

A family says how to read its ``config.json`` into a ``ModelSpec`` and what it calls its tensors.
Attention, gate, rope and layers are shared and know no family.
"""

from __future__ import annotations

from moe_model.families import deepseek_v3, mixtral
from moe_model.families.base import Family

FAMILIES: tuple[Family, ...] = (deepseek_v3.FAMILY, mixtral.FAMILY)


def family_named(name: str) -> Family:
    """The family that a ``ModelSpec.family`` names."""
    return next(family for family in FAMILIES if family.name == name)
