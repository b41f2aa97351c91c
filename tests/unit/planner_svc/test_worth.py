from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mesh.settings import PlannerSettings, RouterSettings, Settings
from planner_svc.policies.eplb import Eplb
from planner_svc.policies.problem import Problem, Topology
from planner_svc.policies.uniform import Uniform
from planner_svc.worth import DecideRules, Question, judge, priced, think

RULES = DecideRules.of(Settings(planner=PlannerSettings(horizon_s=100.0, min_gain=0.02)), 1)
# Two ranks of two slots; experts 0 and 1 get nearly everything and lie on the first.
LOADS = np.array([[[45.0, 45.0, 5.0, 5.0]]])
HELD = np.array([[0, 1, 2, 3]])


def question(loads: Any = LOADS, held: Any = HELD, **changes: Any) -> Question:
    given: dict[str, Any] = {
        "window": loads,
        "topology": Topology(slots=(2, 2), nodes=(0, 0), speeds=(1.0, 1.0)),
        "previous": held,
        "previous_slots": (2, 2),
    }
    problem = Problem(**(given | changes))
    return Question(problem, RULES, ("a", "b"), epoch=1, span_s=10.0, pair_s=0.01, slot_s=0.5)


def test_gain_is_what_the_fullest_ranks_save_and_cost_what_loading_takes() -> None:
    thought = think(Eplb("global"), question())
    assert thought.error == ""
    # 90 of 100 pairs on one rank become 50: 40 pairs in 10 s, at 10 ms each, for 100 s.
    assert thought.gain_s == pytest.approx(4.0)
    assert thought.saved == pytest.approx(40 / 90)
    assert thought.moves == 2
    assert thought.cost_s == pytest.approx(1.0)
    assert (thought.before, thought.after) == (pytest.approx(50 / 90), 1.0)
    assert judge(thought, "auto", force=False)[0] == "moving"
    assert judge(thought, "advise", force=True)[0] == "advised"
    assert judge(thought, "off", force=True)[0] == "skipped"


def test_a_plan_that_costs_more_than_it_gains_is_skipped_unless_forced() -> None:
    dear = replace(question(), slot_s=10.0)
    verdict, reason = judge(think(Eplb("global"), dear), "auto", force=False)
    assert verdict == "skipped"
    assert "gain 4 s" in reason
    assert "cost 20 s for 2 slots" in reason
    assert judge(think(Eplb("global"), dear), "auto", force=True)[0] == "moving"


def test_a_plan_that_saves_little_is_skipped_however_cheap() -> None:
    slight = question(np.array([[[51.0, 2.0, 50.0, 1.0]]]))
    better = priced(slight, np.array([[0, 3, 2, 1]]), (2, 2), slight.problem.window[0])
    assert better.saved == pytest.approx(1 / 53)
    verdict, reason = judge(replace(better, cost_s=0.0), "auto", force=False)
    assert verdict == "skipped"
    assert "planner.min_gain = 2.0%" in reason


def test_what_is_in_place_already_moves_nothing_even_if_forced() -> None:
    even = question(np.ones((1, 1, 4)))
    verdict, reason = judge(think(Uniform(), even), "auto", force=True)
    assert (verdict, reason) == ("skipped", "the placement in force is what the policy wants")


def test_pins_that_are_not_kept_are_reason_enough() -> None:
    pinned = replace(question(np.zeros((1, 1, 4)), pins={(0, 3): (0,)}), slot_s=1e6)
    thought = think(Uniform(), pinned)
    verdict, reason = judge(thought, "auto", force=False)
    assert verdict == "moving"
    assert reason.startswith("1 pinned copies are missing; ")
    assert thought.rows is not None
    assert 3 in thought.rows[0, :2]


def test_a_slow_rank_weighs_more() -> None:
    speeds = Topology(slots=(2, 2), nodes=(0, 0), speeds=(0.5, 1.0))
    slow = priced(question(topology=speeds), np.array([[2, 3, 0, 1]]), (2, 2), LOADS[0])
    # 90 pairs at half speed take 180; then 10 at half speed and 90 at full: 90.
    assert slow.saved == pytest.approx(0.5)


def test_copies_count_as_the_routers_split_them() -> None:
    rows, slots = np.array([[0, 1, 0, 2, 3]]), (2, 3)
    ask = question(topology=Topology(slots=slots, nodes=(0, 0), speeds=(1.0, 1.0)))
    even = Settings(router=RouterSettings(replica_choice="even"))
    by_batch = priced(ask, rows, slots, LOADS[0])
    blindly = priced(replace(ask, rules=DecideRules.of(even, 1)), rows, slots, LOADS[0])
    assert by_batch.after == pytest.approx(1.0, abs=0.01)
    assert blindly.after == pytest.approx(50 / 67.5)


def test_a_forecast_tells_how_tokens_fall_and_the_window_how_many_there_are() -> None:
    class Prophet(Eplb):
        def plan(self, problem: Problem) -> Any:
            return replace(super().plan(problem), expected=problem.window.sum(axis=0) * 1e6)

    assert think(Prophet("global"), question()).gain_s == pytest.approx(4.0)


def test_a_policy_without_an_answer_fails_with_its_reason() -> None:
    tight = question(topology=Topology(slots=(1, 2), nodes=(0, 0), speeds=(1.0, 1.0)))
    thought = think(Eplb("global"), tight)
    verdict, reason = judge(thought, "auto", force=True)
    assert verdict == "failed"
    assert "1 + 2 = 3" in reason


def test_an_experts_group_is_kept_together_where_there_are_nodes_to_keep_it_on() -> None:
    def rule(groups: Any, num_groups: int, nodes: int) -> str:
        settings = Settings(planner=PlannerSettings(groups=groups))
        return DecideRules.of(settings, num_groups).group_rule(nodes)

    assert rule("auto", 4, 2) == "soft"
    assert rule("auto", 4, 1) == "off"
    assert rule("auto", 1, 2) == "off"
    assert rule("strict", 4, 2) == "strict"
