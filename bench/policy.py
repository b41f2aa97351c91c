"""The default placement policy as the evaluation of placement policies wants it.

    python EVALUATION/evaluate.py bench.policy:fresh
    python EVALUATION/evaluate.py bench.policy:make

``fresh`` plans each window anew, without regard for moves; ``make`` is what a mesh runs. A case has
the fields ``layers experts slots gpus nodes groups hierarchical``; its slots divide evenly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from planner_svc.policies.mesh import MeshPolicy
from planner_svc.policies.problem import Problem, Topology


class Planner:
    """``plan(window [steps, layers, experts], previous) -> int [layers, slots]`` for one case."""

    def __init__(self, case: Any, policy: MeshPolicy) -> None:
        self._policy = policy
        self._topology = Topology(
            slots=(case.slots // case.gpus,) * case.gpus,
            nodes=tuple(rank // (case.gpus // case.nodes) for rank in range(case.gpus)),
            speeds=(1.0,) * case.gpus,
        )
        self._groups = case.groups
        self._rule = "soft" if case.hierarchical else "off"

    def plan(self, window: npt.NDArray[Any], previous: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        problem = Problem(
            window=np.asarray(window, np.float64),
            topology=self._topology,
            previous=previous,
            groups=self._groups,
            group_rule=self._rule,
        )
        return self._policy.plan(problem).rows


def fresh(case: Any) -> Planner:
    return Planner(case, MeshPolicy(forecast=False, move_averse=False))


def make(case: Any) -> Planner:
    return Planner(case, MeshPolicy())
