"""Decode steps that a router's device goes through by itself, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ahead_engine import (  # noqa: F401 - these tests and what they take
    fleet,
    oracle,
    own_fleet,
    test_a_move_makes_answers_stale_and_steps_are_run_again,
    test_a_worker_that_is_killed_in_mid_step_costs_its_lane_only,
    test_a_worker_that_stands_still_is_gone_round_until_it_answers,
    test_tokens_are_the_references_and_all_is_counted_as_on_the_hosts_way,
)
from ep_kernels.plane import LaneShape
from ep_kernels.shm.router import ShmRouterPlane
from ep_kernels.triton.device import open_device
from ep_kernels.triton.symm import SymmRouterPlane
from model_peer import DIGEST, serve_over_symm

from moe_model.device.ahead import DeviceAhead
from moe_model.device.model import load_device_model
from tests.support.checkpoints import VARIANTS, write


class OnDevice:
    near = "symm"
    serve = staticmethod(serve_over_symm)

    def __init__(self, path: Path) -> None:
        self.path = path
        self._device = open_device("interpreter")

    def plane(self, incarnation: int, shape: LaneShape) -> ShmRouterPlane:
        return SymmRouterPlane("r0", incarnation, shape, DIGEST, self._device)

    def model(self) -> Any:
        return load_device_model(self.path, self._device, weights="fp32")

    def ahead(self, model: Any, plane: ShmRouterPlane) -> DeviceAhead:
        assert isinstance(plane, SymmRouterPlane)
        return DeviceAhead(model, plane, self._device)


@pytest.fixture(scope="module")
def side(checkpoints: Path) -> OnDevice:
    family, config = VARIANTS["deepseek"]
    # Keys are split by the longest context, and the interpreter runs each share's program.
    short = config | {"max_position_embeddings": 96}
    return OnDevice(write(checkpoints / "short", family, short))
