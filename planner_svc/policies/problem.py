"""What a placement policy is given and what it returns. Pure data on numpy arrays.

A policy plans *serving* slots only; spare slots, epochs and the order of moves are the roll-out's
business. All policies take a ``Problem`` and return a ``Plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

EMPTY = -1
"""Logical expert of a slot that holds none."""


class PlanError(Exception):
    """No placement can hold the model on these ranks; the message shows the arithmetic."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks that may hold experts. All tuples are ``[ranks]``."""

    slots: tuple[int, ...]
    """Serving slots per MoE layer; 0 for a rank that is dead or drains. Need not be equal."""
    nodes: tuple[int, ...]
    """Number of the node that the rank is on."""
    speeds: tuple[float, ...]
    """Relative speed; a rank of speed 0.7 is to get 0.7 times the load."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One planning problem."""

    window: Loads
    """``[steps, layers, experts]`` real tokens, oldest step first. Zeros where nothing was seen."""
    topology: Topology
    previous: Rows | None = None
    """``[layers, previous slots]`` logical experts in force, ``EMPTY`` where a slot is free. None:
    nothing is loaded yet."""
    previous_slots: tuple[int, ...] | None = None
    """``[ranks]`` consecutive slots of each rank in ``previous``; None: ``topology.slots``."""
    groups: int = 1
    """Expert groups of equal size (consecutive experts) that the gate limits tokens to."""
    group_rule: Literal["strict", "soft", "off"] = "off"
    """strict: all copies of a group's experts lie on one node. soft: one copy of each does."""
    pins: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """(layer index, expert) -> ranks that must hold a copy."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each expert goes."""

    rows: Rows
    """``[layers, slots]``: every expert at least once, none twice on a rank while avoidable. An
    expert that stays on its rank stays in its slot."""
    expected: Loads
    """``[layers, experts]`` the load that it was made for (the forecast, or the window's sum)."""
    notes: tuple[str, ...] = ()
    """What was odd about the input (NaN, negative counts), in words."""


class Policy(Protocol):
    """May keep state between calls (what it forecast, to know whether that came true)."""

    name: str

    def plan(self, problem: Problem) -> Plan:
        """Raises ``PlanError``."""
