"""Decode steps that C goes through by itself on the CPU: with 16-bit weights, and of one token
where matrices are small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_engine import (  # noqa: F401 - these tests and what they take
    fleet,
    oracle,
    own_fleet,
    test_a_move_makes_answers_stale_and_steps_are_run_again,
    test_a_worker_that_is_killed_in_mid_step_costs_its_lane_only,
    test_a_worker_that_stands_still_is_gone_round_until_it_answers,
    test_tokens_are_the_references_and_all_is_counted_as_on_the_hosts_way,
)
from ep_kernels.half import has_kernel
from ep_kernels.plane import LaneShape
from ep_kernels.shm.router import ShmRouterPlane
from model_peer import DIGEST, serve_over_shm

from moe_model.ahead import HostAhead, host_ahead
from moe_model.model import load_router_model
from tests.support.checkpoints import variant


class InC:
    near = "shm"
    serve = staticmethod(serve_over_shm)

    def __init__(self, path: Path) -> None:
        self.path = path

    def plane(self, incarnation: int, shape: LaneShape) -> ShmRouterPlane:
        return ShmRouterPlane("r0", incarnation, shape, DIGEST)

    def model(self) -> Any:
        return load_router_model(self.path)

    def ahead(self, model: Any, plane: ShmRouterPlane) -> HostAhead:
        found = host_ahead(model, plane, choice="water-fill", shares=False)
        assert found is not None, "such layers go through C"
        return found


@pytest.fixture(scope="module", params=["deepseek-16-bit", "deepseek"])
def side(request: pytest.FixtureRequest, checkpoints: Path) -> InC:
    if request.param == "deepseek-16-bit" and not has_kernel():
        pytest.skip("no kernel for 16-bit weights here")
    torch.set_num_threads(1)
    return InC(variant(request.param, checkpoints))
