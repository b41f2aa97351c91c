"""From the setting ``planner.policy`` to the policy. Pure."""

from __future__ import annotations

from mesh.settings import PlannerSettings
from planner_svc.policies.eplb import Eplb
from planner_svc.policies.mesh import MeshPolicy
from planner_svc.policies.problem import Policy
from planner_svc.policies.threshold import Threshold
from planner_svc.policies.uniform import Uniform


def make_policy(settings: PlannerSettings) -> Policy:
    """The policy that ``settings`` name. Raises ``PlanError`` for settings it cannot work with."""
    match settings.policy:
        case "mesh":
            return MeshPolicy(forecast=settings.forecast)
        case "hierarchical" | "global":
            return Eplb(settings.policy)
        case "threshold":
            return Threshold(settings.hot_factor, settings.cold_factor)
        case "uniform":
            return Uniform()
