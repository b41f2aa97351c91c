"""ctypes front of ``native/plan.c``: plans all layers of a model in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner_svc.policies.problem import Loads, Rows, Topology

LIBRARY = Path(__file__).parents[1] / "native" / "plan.so"
RULES = {"off": 0, "soft": 1, "strict": 2}


class _Request(ctypes.Structure):
    """``Request`` of plan.c, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                *("layers", "experts", "ranks", "nodes", "groups"),
                *("rule", "keep", "pins", "steps"),
            )
        ),
        ("tolerance", ctypes.c_double),
        ("price", ctypes.c_double),
        ("joined", ctypes.c_double),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("first", "pace", "node_of", "loads"),
                *("previous", "previous_first", "pin", "rows"),
            )
        ),
    )


def _offsets(slots: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(slots))).astype(np.int32)


class Solver:
    """The compiled search. Holds no state between calls.

    Raises ``OSError`` when the library was not built.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(LIBRARY))
        self._library.plan_layers.argtypes = [ctypes.POINTER(_Request)]
        self._library.plan_layers.restype = ctypes.c_int

    def plan(
        self,
        loads: Loads,
        topology: Topology,
        *,
        previous: Rows | None,
        previous_slots: Sequence[int],
        keep: bool,
        groups: int,
        rule: str,
        pins: np.ndarray,
        tolerance: float,
        price: float,
        joined: float,
        steps: int,
    ) -> tuple[Rows, int]:
        """Rows ``[layers, slots]`` and the number of layers whose group rule was left out.

        ``loads`` ``[layers, experts]`` are finite and not negative; ``pins`` ``[pins, 3]`` int32 of
        (layer, expert, rank). With ``keep`` the search starts from ``previous`` and makes a change
        only if it removes ``price`` times a rank's mean load of excess per fetched expert.
        """
        layers, experts = loads.shape
        first = _offsets(topology.slots)
        node_names, node_of = np.unique(topology.nodes, return_inverse=True)
        rows = np.empty((layers, int(first[-1])), np.int64)
        arrays = {
            "first": first,
            "pace": 1.0 / np.asarray(topology.speeds, np.float64),
            "node_of": node_of.astype(np.int32),
            "loads": np.ascontiguousarray(loads, np.float64),
            "previous_first": _offsets(previous_slots),
            "pin": np.ascontiguousarray(pins, np.int32),
            "rows": rows,
        }
        if previous is not None:
            arrays["previous"] = np.ascontiguousarray(previous, np.int64)
        request = _Request(
            layers=layers,
            experts=experts,
            ranks=len(topology.slots),
            nodes=len(node_names),
            groups=groups,
            rule=RULES[rule],
            keep=int(keep),
            pins=len(pins),
            steps=steps,
            tolerance=tolerance,
            price=price,
            joined=joined,
            **{name: array.ctypes.data for name, array in arrays.items()},
        )
        outcome = self._library.plan_layers(ctypes.byref(request))
        if outcome < 0:
            raise MemoryError
        return rows, outcome
