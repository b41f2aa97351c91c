from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesh.messages import LoadReport, PinDetail, Placement
from mesh.settings import PlannerSettings, Settings
from planner_svc.balance import LoadWindow
from planner_svc.decide import SOON_S, Decider, Orders, Scene
from planner_svc.moves import ModelShape, Target
from planner_svc.policies.eplb import Eplb
from planner_svc.prices import Prices
from planner_svc.worth import DecideRules, Question, think

SHAPE = ModelShape(moe_layers=(3,), num_experts=4)
SETTINGS = Settings(
    planner=PlannerSettings(
        policy="global", interval_s=30.0, min_window_tokens=100, horizon_s=300.0
    )
)
POLICY = Eplb("global")
LIVE: dict[str, Any] = {"epoch": 7, "phase": "loading", "moved": 1, "to_move": 2}


def scene(rows: tuple[int, ...] = (0, 1, 2, 3), epoch: int = 1, **changes: Any) -> Scene:
    placement = Placement(
        epoch=epoch,
        moe_layers=SHAPE.moe_layers,
        num_experts=4,
        ranks=("a", "b"),
        slots_per_rank=(len(rows) // 2, len(rows) // 2),
        physical_to_logical=(rows,),
    )
    where = Scene(placement, ("a", "b"), (2, 2), hosts=("h", "h"), speeds=(1.0, 1.0))
    return replace(where, **changes)


def decider(mode: Any = "auto", orders: Orders | None = None) -> Decider:
    prices = Prices(expert_bytes=1, bytes_per_s=0)
    rules = DecideRules.of(SETTINGS, 1)
    return Decider(rules, SHAPE, mode, prices, unix_s=1e9, orders=orders or Orders())


def loaded(
    tokens: int = 1_000,
    counts: tuple[int, ...] = (45_000, 45_000, 500, 500),
    at: float = 0.0,
) -> LoadWindow:
    window = LoadWindow(1, 4, span_s=60.0, buckets=12)
    window.add(LoadReport(id="r", incarnation=1, counts=(counts,), tokens=tokens), at)
    return window


def asked(state: Decider, now: float = 10.0, **where: Any) -> Question:
    assert state.wants(now)
    question = state.ask(scene(**where), loaded(at=now - 10.0), now)
    assert isinstance(question, Question)
    return question


def moving(state: Decider, now: float = 10.0) -> Target:
    target = state.hear(think(POLICY, asked(state, now)), scene(), now)
    assert target is not None
    return target


def test_a_plan_worth_its_moves_is_handed_to_the_roll_out() -> None:
    state = decider()
    target = moving(state)
    assert (target.ranks, target.slots_per_rank, target.why) == (("a", "b"), (2, 2), "rebalance")
    detail = state.detail(LIVE)
    assert (detail.verdict, detail.moves, detail.epoch, detail.phase) == ("moving", 2, 7, "loading")
    assert detail.planned_at == 1e9 + 10.0
    assert (detail.balancedness_before, detail.balancedness_after) == (
        pytest.approx(0.506, 0.01),
        1,
    )
    assert detail.proposed is not None
    assert detail.proposed.physical_to_logical == target.rows
    state.finished()
    assert state.detail(LIVE).verdict == "moved"
    assert state.plans == {"moving": 1, "moved": 1}


def test_a_plan_is_made_an_interval_after_the_last() -> None:
    state = decider()
    moving(state, 10.0)
    assert not state.wants(39.9)
    assert state.wants(40.0)


def test_only_one_plan_is_made_at_a_time() -> None:
    state = decider()
    question = asked(state)
    state.rebalance(force=False)
    assert not state.wants(99.0)
    state.hear(think(POLICY, question), scene(), 11.0)
    assert state.wants(11.0)  # what was asked for meanwhile


def test_advice_moves_nothing() -> None:
    state = decider("advise")
    assert state.hear(think(POLICY, asked(state)), scene(), 10.0) is None
    detail = state.detail(LIVE)
    assert detail.verdict == "advised"
    assert detail.reason.startswith("worth it: gain ")
    assert detail.proposed is not None


def test_off_plans_nothing_and_a_mode_takes_effect_soon() -> None:
    state = decider("off")
    assert not state.wants(99.0)
    state.set_mode("auto", 99.0)
    assert state.wants(99.0 + SOON_S)
    question = asked(state, 110.0)
    state.set_mode("off", 110.0)
    assert state.hear(think(POLICY, question), scene(), 111.0) is None
    assert state.detail(LIVE).reason == "the mode is off"


def test_too_few_tokens_are_chance_and_said_once() -> None:
    state = decider()
    few = loaded(tokens=99)
    reason = state.ask(scene(), few, 0.0)
    assert reason == "99 tokens in the window, fewer than planner.min_window_tokens = 100"
    assert state.detail(LIVE).reason == reason
    assert not state.wants(29.0)
    assert state.ask(scene(), few, 30.0) == ""
    # An administrator may ask all the same, and then decides by the numbers.
    state.rebalance(force=False)
    assert state.wants(31.0)
    assert isinstance(state.ask(scene(), few, 31.0), Question)


def test_a_pin_is_kept_without_any_load() -> None:
    state = decider()
    assert isinstance(state.ask(scene(), loaded(0, (0, 0, 0, 0)), 0.0), str)
    state.pin(0, 3, ("a", "gone"), 1.0)
    assert state.wants(1.0 + SOON_S)
    question = state.ask(scene(), loaded(0, (0, 0, 0, 0)), 5.0)
    assert isinstance(question, Question)
    assert question.problem.pins == {(0, 3): (0,)}
    target = state.hear(think(POLICY, question), scene(), 5.0)
    assert target is not None
    assert 3 in target.rows[0][:2]
    assert state.detail(LIVE).pins == (PinDetail(layer=3, expert=3, ranks=("a", "gone")),)
    state.pin(0, 3, (), 6.0)
    assert state.detail(LIVE).pins == ()


def test_the_policy_is_told_what_each_live_rank_holds_and_where_it_is() -> None:
    # Rank b has died, c has joined; a holds a spare slot besides.
    where = scene(
        (0, 1, -1, 2, 3, -1),
        ranks=("a", "c"),
        slots=(2, 2),
        hosts=("h", "i"),
        speeds=(1.0, 0.5),
    )
    question = decider().ask(where, loaded(), 0.0)
    assert isinstance(question, Question)
    problem = question.problem
    assert problem.previous is not None
    assert problem.previous.tolist() == [[0, 1, -1]]
    assert problem.previous_slots == (3, 0)
    assert problem.topology.nodes == (0, 1)
    assert problem.topology.speeds == (1.0, 0.5)
    assert problem.window.sum() == 91_000


@pytest.mark.parametrize("then", [scene(epoch=2), scene(slots=(3, 2)), None])
def test_a_plan_for_a_mesh_that_has_changed_meanwhile_is_dropped(then: Scene | None) -> None:
    state = decider()
    thought = think(POLICY, asked(state))
    assert state.hear(thought, then, 11.0) is None
    assert "changed" in state.detail(LIVE).reason
    assert state.wants(11.0 + SOON_S)


def test_force_moves_what_is_not_worth_it_once() -> None:
    state = decider()
    state.rebalance(force=True)
    even = LoadWindow(1, 4, span_s=60.0, buckets=12)
    even.add(LoadReport(id="r", incarnation=1, counts=((9, 8, 8, 8),), tokens=500), 0.0)
    for wanted in (True, False):
        question = state.ask(scene(), even, 1.0)
        assert isinstance(question, Question)
        thought = replace(think(POLICY, question), moves=2)
        assert (state.hear(thought, scene(), 1.0) is not None) == wanted


def test_a_policy_that_fails_is_asked_ever_less_often() -> None:
    state = decider()
    pauses = []
    now = 0.0
    for _ in range(8):
        question = asked(state, now)
        state.hear(replace(think(POLICY, question), rows=None, error="no way"), scene(), now)
        pause = next(p for p in range(10_000) if state.wants(now + p))
        pauses.append(pause)
        now += pause
    assert pauses[:4] == [60, 120, 240, 480]
    assert set(pauses[4:]) == {600}
    assert state.detail(LIVE).verdict == "failed"
    assert state.alarms == ("no plan can be made: no way",)
    moving(state, now)
    assert state.alarms == ()
    assert state.wants(now + 30.0)


def test_a_failed_move_says_why_until_it_is_done() -> None:
    state = decider()
    moving(state)
    state.failed("a: no answer", given_up=False)
    assert state.detail(LIVE).verdict == "failed"
    assert state.detail(LIVE).reason.startswith("a: no answer; worth it")
    assert state.own_move
    state.finished()
    assert state.detail(LIVE).verdict == "moved"
    assert not state.own_move


def test_an_administrators_placement_is_reported_as_the_plan() -> None:
    state = decider("off")
    target = Target(("b", "a"), (1, 3), ((2, 3, 0, 1),), "admin")
    state.propose(target, scene(), loaded(), 5.0)
    detail = state.detail(LIVE)
    assert (detail.verdict, detail.moves) == ("moving", 1)
    assert detail.balancedness_after < detail.balancedness_before
    assert detail.proposed is not None
    assert detail.proposed.ranks == ("a", "b")
    assert detail.proposed.physical_to_logical == ((3, 0, 1, 2),)
    assert not state.own_move


def test_orders_outlive_the_process() -> None:
    state = decider("auto")
    state.set_mode("off", 0.0)
    state.pin(0, 1, ("a",), 0.0)
    again = decider("auto", state.orders())
    assert again.mode == "off"
    assert again.pins == {(0, 1): ("a",)}
    # What does not fit the model any more is left out.
    strange = Orders(pins=(PinDetail(layer=99, expert=0, ranks=("a",)),))
    assert decider("auto", strange).pins == {}
    assert decider("advise", strange).mode == "advise"


def test_numbers_that_are_none_do_not_decide() -> None:
    question = asked(decider())
    assert np.isfinite(question.problem.window).all()
    assert question.span_s >= 1.0
