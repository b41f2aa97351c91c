"""The placement that the operator wants a mesh to start from."""

from __future__ import annotations

import numpy as np

from mesh.messages import Placement
from mesh.settings import Settings
from moe_model.architecture import ModelSpec
from planner_svc.formats import Shape, read_initial
from planner_svc.policies.checks import verify
from planner_svc.policies.problem import Policy, Problem, Topology
from planner_svc.policies.uniform import UNLIMITED, slots_per_rank
from planner_svc.worth import DecideRules


def initial_placement(
    settings: Settings, spec: ModelSpec, policy: Policy, epoch: int
) -> Placement | None:
    """What ``planner.initial_placement`` says, on the expert workers that the launcher starts; None
    to begin evenly. From counts ``policy`` makes a plan.

    Raises ``FormatError`` and ``PlanError``.
    """
    shape = Shape(spec.moe_layers, spec.num_layers, spec.num_experts)
    initial = read_initial(settings.planner.initial_placement, shape)
    ranks = tuple(f"expert-{index}" for index in range(settings.mesh.experts))
    if initial.rows is not None:
        return initial.placement(ranks, epoch)
    if initial.loads is None:
        return None
    offers = [settings.expert.slots_per_layer or UNLIMITED] * len(ranks)
    slots = slots_per_rank(spec.num_experts, settings.planner.redundant_slots, offers)
    nodes, speeds = (0,) * len(ranks), (1.0,) * len(ranks)
    rules = DecideRules.of(settings, spec.gate.num_groups)
    problem = Problem(
        window=np.asarray(initial.loads, dtype=np.float64),
        topology=Topology(slots, nodes, speeds),
        groups=rules.num_groups,
        group_rule=rules.group_rule(num_nodes=1),
    )
    plan = policy.plan(problem)
    verify(plan, problem)
    return Placement(
        epoch=epoch,
        moe_layers=spec.moe_layers,
        num_experts=spec.num_experts,
        ranks=ranks,
        slots_per_rank=slots,
        physical_to_logical=tuple(tuple(row) for row in plan.rows.tolist()),
    )
