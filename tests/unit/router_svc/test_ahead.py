"""When a router lets its device go through a step by itself, and what it makes of the outcome. What
it does is in ``tests/kernels/ahead_engine.py``.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import structlog
import torch
from ep_kernels.crew import Crew
from ep_kernels.triton.device import DeviceHung

from mesh.layer_groups import LayerGroups
from mesh.messages import Placement
from mesh.settings import ExpertSettings, RouterSettings, Settings
from router_svc.ahead import FAULTS, Ahead
from router_svc.experts import MeshExperts
from router_svc.profile import LayerTimes, Times
from router_svc.service import goes_ahead

EXPERTS, LAYERS, TOKENS, TOP_K, HIDDEN = 4, (1, 3), 2, 2, 8
ONE = [SimpleNamespace(count=1)] * TOKENS


class Device:
    """What a device would say of each step: a fault, nothing, or an error to raise. ``spent``: what
    C would say of its layers.
    """

    on_device = True
    most_wait_s = 20.0

    def __init__(self) -> None:
        self.in_reach = True
        self.reaches: list[bool] = []
        self.spent: np.ndarray | None = None
        self.outcomes: list[object] = []
        self.routes = 0
        self.limits: list[float] = []

    def fits(self, counts: list[int]) -> bool:
        return max(counts) == 1

    def route_by(self, layers, ranks) -> None:
        assert len(layers) == len(LAYERS)
        assert ranks == ("a", "b")
        self.routes += 1
        self.in_reach = self.reaches.pop(0) if self.reaches else True

    def run(self, plan, kv, *, step, epoch, limit_s, launched):
        launched()
        self.limits.append(limit_s)
        outcome = self.outcomes.pop(0) if self.outcomes else ""
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            return None
        sent = np.array([[[2, 3], [1, 1]], [[0, 0], [2, 4]]], dtype=np.int32)
        return SimpleNamespace(
            fault=outcome,
            peer="b",
            hidden=torch.zeros(TOKENS, HIDDEN),
            logits=torch.zeros(TOKENS, 5),
            spent=self.spent,
            ids=np.array([[[0, 1], [2, 1]], [[3, 2], [3, 0]]], dtype=np.int32),
            sent=sent,
        )


class Router:
    def __init__(self) -> None:
        self.clock = 0.0
        self.pumped = self.launched = 0
        plane = SimpleNamespace(on_device=True, peers=lambda: {"a": 1, "b": 1})
        self.experts = MeshExperts(
            plane,
            num_experts=EXPERTS,
            moe_layers=LAYERS,
            capacity_tokens=8,
            replica_choice="water-fill",
            exact=False,
            timeout_s=30.0,
            answer_timeout_s=10.0,
            clock=lambda: self.clock,
            times=Times(),
            crew=Crew(0),
        )
        self.device = Device()
        self.times = Times()
        self.ahead = Ahead(
            self.device,
            self.experts,
            pump=self._pump,
            launched=self._launch,
            times=self.times,
            log=structlog.get_logger("test"),
            wire_bytes=2,
        )
        self.place()

    def place(self, serving=("a", "b"), silent=()) -> None:
        row = tuple(range(EXPERTS))
        placement = Placement(
            epoch=1, moe_layers=LAYERS, num_experts=EXPERTS, ranks=("a", "b"),
            slots_per_rank=(2, 2), physical_to_logical=(row,) * len(LAYERS),
        )  # fmt: skip
        self.experts.route_by(placement, serving, (), silent)

    def _pump(self) -> None:
        self.pumped += 1

    def _launch(self) -> None:
        self.launched += 1

    def step(self) -> bool:
        """Whether it went ahead."""
        return self.ahead.may(ONE) and self.ahead.run(None, None, b"\1\0") is not None


@pytest.fixture
def router() -> Router:
    return Router()


def test_a_step_is_counted_as_the_host_counts_it(router: Router) -> None:
    assert router.step()
    experts = router.experts
    assert experts.counts.tokens.tolist() == [[1, 2, 1, 0], [1, 0, 1, 2]]
    assert experts.counts.decodes.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert experts.rank_pairs == {"a": [3, 0], "b": [1, 4]}
    lanes = {name: (lane.sent, lane.received) for name, lane in experts.lane_bytes.items()}
    row_bytes, sum_bytes = 2 * HIDDEN, 4 * HIDDEN
    assert lanes["a"] == (2 * row_bytes + 3 * 16, 2 * sum_bytes)
    assert lanes["b"] == (3 * row_bytes + 5 * 16, 3 * sum_bytes)
    tally = experts.tally
    assert (tally.ahead, tally.dispatches, tally.messages) == (1, 2, 3)
    assert (router.launched, router.pumped) == (1, 1)
    assert router.times.ahead_ns > 0


def test_what_layers_took_is_counted_as_the_hosts_way_counts_it(router: Router) -> None:
    router.times.layers = LayerTimes(LayerGroups(2))
    router.device.spent = np.array(
        [[1, 0, 0, 0, 0, 2, 0, 0, 0], [10, 20, 1, 2, 3, 40, 50, 60, 7]], dtype=np.int64
    )
    assert router.step()
    times = router.times
    assert (times.attention_ns, times.gate_ns, times.shared_ns) == (11, 20, 42)
    assert (times.send_ns, times.wait_ns, times.combine_ns, times.idle_ns) == (6, 50, 60, 7)
    assert times.ahead_ns == 0
    layers = times.layers
    assert (layers.compute, layers.dispatch) == ([3, 70], [0, 6])
    assert (layers.wait, layers.combine) == ([0, 50], [0, 60])
    assert router.experts.tally.away_ns == 6 + 40 + 50


@pytest.mark.parametrize("fault", FAULTS)
def test_of_a_step_in_vain_nothing_is_counted_but_that(router: Router, fault: str) -> None:
    router.device.outcomes = [fault]
    assert not router.step()
    experts = router.experts
    assert experts.tally.again == {fault: 1}
    assert not experts.counts.tokens.any()
    assert (experts.tally.ahead, experts.tally.messages, experts.rank_pairs) == (0, 0, {})
    assert router.pumped == 2  # what became of the lane is looked at before the host's way


def test_each_step_in_vain_in_a_row_is_followed_by_twice_as_many_others(router: Router) -> None:
    gone = []
    router.device.outcomes = ["stale"] * 3
    while len(gone) < 13:
        gone.append(router.step())
    assert router.experts.tally.again == {"stale": 3}
    # in vain, 1 other, in vain, 2, in vain, 4, and then it goes well
    assert gone == [False] * 10 + [True] * 3
    router.device.outcomes = ["stale"]
    assert [router.step() for _ in range(3)] == [False, False, True]


def test_what_stands_against_it(router: Router) -> None:
    assert not router.ahead.may([SimpleNamespace(count=3)])
    assert router.ahead.may(ONE)
    router.place(serving=("a",))  # some experts have no place
    assert not router.ahead.may(ONE)
    router.place(silent=("b",))
    assert not router.ahead.may(ONE)
    router.place(silent=("somebody",))
    assert router.ahead.may(ONE)
    router.device.most_wait_s = 0.5  # less than a worker may take
    assert not router.ahead.may(ONE)
    router.device.most_wait_s = 20.0
    assert router.experts.found_slow("b", 1.0)
    assert not router.ahead.may(ONE)


def test_a_late_worker_is_slow_from_then_on(router: Router) -> None:
    router.clock = 100.0
    router.device.outcomes = ["timed_out"]
    assert not router.step()
    assert not router.experts.can_go_ahead
    hung, slow = router.experts.overdue()
    assert (hung, slow) == ([], [])  # known already, and not hung yet
    router.clock += 10.0
    assert router.experts.overdue() == (["b"], [])
    assert not router.experts.found_slow("b", 1.0)


def test_routes_are_given_to_the_device_when_they_change(router: Router) -> None:
    assert router.step()
    assert router.step()
    assert router.device.routes == 1
    router.place()
    assert router.step()
    assert router.device.routes == 2


def test_what_was_out_of_reach_is_looked_at_again_when_routes_change(router: Router) -> None:
    router.device.reaches = [False]
    assert not router.ahead.may(ONE)
    assert not router.ahead.may(ONE)
    assert router.device.routes == 1
    router.place()
    assert router.step()


def test_patience_grows_with_what_steps_take(router: Router) -> None:
    assert router.step()
    assert router.device.limits == [1.0]
    router.experts.took(2.0)
    assert router.step()
    assert router.device.limits[-1] == pytest.approx(8.0, rel=0.1)
    router.experts.took(60.0)
    assert router.step()
    assert router.device.limits[-1] == 10.0  # then it counts as hung


def test_without_a_lane_the_host_goes_its_way_and_nothing_is_counted(router: Router) -> None:
    router.device.outcomes = [None]
    assert not router.step()
    assert router.experts.tally.again == {}
    assert router.step()


def test_a_defect_costs_steps_ahead_and_a_hung_device_the_router(router: Router) -> None:
    router.device.outcomes = [DeviceHung("cuda", 30.0), ValueError("a defect")]
    with pytest.raises(DeviceHung):
        router.step()
    assert not router.step()
    assert not router.ahead.may(ONE)


@pytest.mark.parametrize(
    ("ahead", "router", "expert", "wanted"),
    [
        ("auto", "cuda", "cuda:0", False),
        ("auto", "cuda:0", "cuda:1", True),
        ("auto", "interpreter", "interpreter", True),
        ("on", "cuda", "cuda", True),
        ("off", "cuda:0", "cuda:1", False),
        ("auto", "cpu", "cpu", True),
        ("off", "cpu", "cpu", False),
    ],
)
def test_on_one_gpu_that_is_shared_it_is_tried_only_when_asked_for(
    ahead: str, router: str, expert: str, wanted: bool
) -> None:
    settings = Settings(
        router=RouterSettings(device=router, ahead=ahead), expert=ExpertSettings(device=expert)
    )
    assert goes_ahead(settings) is wanted
