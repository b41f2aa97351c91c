from __future__ import annotations

from typing import Any

import pytest

from mesh.messages import (
    Admin,
    AdminRefused,
    FromPlanner,
    GetLoad,
    GetPlan,
    LoadDetail,
    LoadReport,
    Pin,
    PinDetail,
    Placement,
    PlanDetail,
    Propose,
    Rebalance,
    Record,
    RecordDetail,
    Recorded,
    RecordLoad,
    SetMode,
)
from mesh.placement import local_slots
from planner_svc.coordinator import Coordinator
from planner_svc.decide import Orders
from planner_svc.effects import Effect, KeepOrders, Note, Think
from planner_svc.moves import ModelShape
from tests.support.planner import (
    UNIX_S,
    beat,
    coordinator,
    hello,
    obeyed,
    placed,
    policy,
    published,
    sent,
)

SHAPE = ModelShape((1, 2), 4)
ADMIN = b"admin"
SKEWED = ((900, 10, 900, 10), (900, 10, 900, 10))


def mesh(**planner: Any) -> tuple[Coordinator, Placement]:
    """Two ready expert workers and a router."""
    state = coordinator(SHAPE, **({"mode": "advise"} | planner))
    placement = placed(state)
    state.received(b"r0", hello("r0", "router"), 0.0)
    state.received(b"r0", beat("r0", epoch=placement.epoch), 0.0)
    return state, placement


def report(state: Coordinator, now: float = 0.0, **more: Any) -> None:
    message = LoadReport(id="r0", incarnation=1, counts=SKEWED, tokens=5_000, **more)
    obeyed(state, state.received(b"r0", message, now), now, policy())


def ask(
    state: Coordinator, message: Admin, now: float = 1.0, peer: bytes = ADMIN
) -> tuple[FromPlanner, list[Effect]]:
    """The answer, and everything that was done until it came."""
    effects = obeyed(state, state.received(peer, message, now), now, policy())
    (answer,) = sent(effects, peer)
    return answer, effects


def plan(state: Coordinator, message: Admin, now: float = 1.0) -> PlanDetail:
    answer, _ = ask(state, message, now)
    assert isinstance(answer, PlanDetail), answer
    return answer


def refused(state: Coordinator, message: Admin, peer: bytes = ADMIN) -> str:
    answer, _ = ask(state, message, peer=peer)
    assert isinstance(answer, AdminRefused), answer
    return answer.reason


# ---------------------------------------------------------------- who may ask


def test_members_other_than_gateways_administer_nothing() -> None:
    state, _ = mesh()
    assert refused(state, GetPlan(), b"r0") == "r0 (router) is no administrator"
    assert refused(state, SetMode(mode="off"), b"e0") == "e0 (expert) is no administrator"
    state.received(b"g0", hello("g0", "gateway"), 0.0)
    answer, _ = ask(state, GetPlan(), peer=b"g0")
    assert isinstance(answer, PlanDetail)


# ---------------------------------------------------------------- questions


def test_loads_are_shown_expert_by_expert_and_rank_by_rank() -> None:
    state, placement = mesh(mode="off")
    by_rank = ((30, 10), (20, 20))
    report(
        state,
        decode_counts=((1, 1, 1, 1), (0, 0, 0, 0)),
        epoch=placement.epoch,
        ranks=placement.ranks,
        rank_tokens=by_rank,
    )
    answer, _ = ask(state, GetLoad(), 5.0)
    assert answer == LoadDetail(
        window_s=5.0,
        moe_layers=(1, 2),
        ranks=("e0", "e1"),
        prefill=((899, 9, 899, 9), SKEWED[1]),
        decode=((1, 1, 1, 1), (0, 0, 0, 0)),
        rank_tokens=by_rank,
        balancedness=(20 / 30, 1.0),
        overall=pytest.approx((20 / 30 + 1.0) / 2),
    )


def test_before_the_first_placement_there_is_load_but_nobody_bears_it() -> None:
    answer, _ = ask(coordinator(SHAPE), GetLoad())
    assert isinstance(answer, LoadDetail)
    assert (answer.ranks, answer.rank_tokens, answer.overall) == ((), (), 1.0)


# ---------------------------------------------------------------- plans


def test_a_plan_is_made_when_asked_for_and_told_to_who_asked() -> None:
    state, placement = mesh(interval_s=900.0)
    report(state)
    detail = plan(state, Rebalance())
    assert (detail.verdict, detail.mode, detail.epoch) == ("advised", "advise", placement.epoch)
    assert detail.planned_at == UNIX_S + 1.0
    assert detail.balancedness_after > detail.balancedness_before
    assert plan(state, GetPlan(), 2.0) == detail


def test_force_moves_in_auto_only() -> None:
    state, placement = mesh(min_gain=0.9)
    report(state)
    assert plan(state, Rebalance(force=True)).verdict == "skipped"
    assert state.view.placement == placement
    plan(state, SetMode(mode="auto"))
    answer, effects = ask(state, Rebalance(force=True))
    assert isinstance(answer, PlanDetail)
    assert answer.verdict in {"moving", "moved"}
    assert published(effects)
    after = state.view.placement
    assert after is not None
    assert after.epoch > placement.epoch
    assert plan(state, GetPlan()).verdict == "moved"


def test_what_cannot_be_planned_is_refused_with_the_reason() -> None:
    state = coordinator(SHAPE, mode="advise")
    assert refused(state, Rebalance()) == "no expert worker has joined"
    state, _ = mesh()
    assert "no tokens" in refused(state, Rebalance())
    plan(state, SetMode(mode="off"))
    report(state)
    assert "the mode is off" in refused(state, Rebalance(force=True))


def test_a_mode_is_kept_for_a_planner_that_is_started_again() -> None:
    state, _ = mesh(mode="auto")
    answer, effects = ask(state, SetMode(mode="off"))
    assert isinstance(answer, PlanDetail)
    assert answer.mode == "off"
    assert KeepOrders(Orders(mode="off")) in effects
    again = coordinator(SHAPE, mode="auto", orders=Orders(mode="off"))
    assert again.status(0.0).mode == "off"


# ---------------------------------------------------------------- pins


def test_a_pinned_expert_is_moved_to_where_it_is_pinned() -> None:
    state, placement = mesh(mode="auto", redundant_slots=2)
    expert = next(e for e in range(4) if e not in placement.physical_to_logical[0][:3])
    detail = plan(state, Pin(layer=1, expert=expert, ranks=("e0",)))
    assert detail.pins == (PinDetail(layer=1, expert=expert, ranks=("e0",)),)
    effects: list[Effect] = []
    for now in (2.0, 4.0, 6.0):
        for rank in placement.ranks:
            effects += obeyed(state, state.received(rank.encode(), beat(rank), now), now, policy())
        effects += obeyed(state, state.tick(now), now, policy())
    assert any(isinstance(effect, Think) for effect in effects)
    after = state.view.placement
    assert after is not None
    assert expert in local_slots(after, "e0")[0]


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        (Pin(layer=0, expert=0, ranks=("e0",)), "layer 0 has no experts; expected one of 1, 2"),
        (Pin(layer=1, expert=4, ranks=("e0",)), "expert 4, expected 0 to 3"),
        (
            Pin(layer=1, expert=0, ranks=("e9",)),
            "e9 is no live expert worker; expected one of e0, e1",
        ),
        (
            Pin(layer=1, expert=0, ranks=("e0", "e1")),
            "with these pins a layer needs 5 slots, the ranks have 4",
        ),
    ],
)
def test_a_pin_that_cannot_be_kept_is_refused(pin: Pin, reason: str) -> None:
    state, _ = mesh()
    assert refused(state, pin) == reason
    assert plan(state, GetPlan()).pins == ()


def test_more_pins_than_slots_are_refused_and_lifting_one_makes_room() -> None:
    state, _ = mesh()
    plan(state, Pin(layer=1, expert=0, ranks=("e0",)))
    plan(state, Pin(layer=1, expert=1, ranks=("e0",)))
    plan(state, Pin(layer=2, expert=2, ranks=("e0",)))
    third = Pin(layer=1, expert=2, ranks=("e0",))
    assert refused(state, third).startswith("e0 has 2 slots a layer, 3 experts of layer 1")
    plan(state, Pin(layer=1, expert=0, ranks=()))
    plan(state, Pin(layer=1, expert=0, ranks=()))  # lifted already
    assert len(plan(state, third).pins) == 3


# ---------------------------------------------------------------- proposals


def test_a_proposed_placement_is_rolled_out_in_any_mode() -> None:
    state, placement = mesh(mode="off")
    proposal = Propose(
        ranks=("e1", "e0"),
        slots_per_rank=(2, 2),
        physical_to_logical=((0, 1, 3, 2), (0, 2, 1, 3)),
    )
    answer, effects = ask(state, proposal)
    assert isinstance(answer, PlanDetail)
    assert answer.verdict == "moving"
    assert any(isinstance(e, Note) and e.event == "plan.done" for e in effects)
    after = state.view.placement
    assert after is not None
    assert after.epoch > placement.epoch
    held = {rank: [set(row) - {-1} for row in local_slots(after, rank)] for rank in after.ranks}
    assert held == {"e1": [{0, 1}, {0, 2}], "e0": [{2, 3}, {1, 3}]}
    assert plan(state, GetPlan()).verdict == "moved"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": ("e0",)}, "1 ranks but slot counts for 2"),
        ({"ranks": ("e0", "e9")}, "e9 cannot hold experts now; accepted: e0, e1"),
        ({"physical_to_logical": ((0, 1, 2, 3),)}, "2 MoE layers but 1 rows of slots"),
        ({"physical_to_logical": ((0, 1, 2, 3), (0, 1, 2, 4))}, "holds expert 4"),
        (
            {"physical_to_logical": ((0, 1, 2, 3), (0, 1, 1, -1))},
            "experts [2, 3] of layer 2 are on no rank",
        ),
    ],
)
def test_a_placement_that_would_not_serve_is_refused(changes: Any, reason: str) -> None:
    state, placement = mesh()
    good: dict[str, Any] = {
        "ranks": ("e0", "e1"),
        "slots_per_rank": (2, 2),
        "physical_to_logical": ((0, 1, 2, 3), (0, 1, 2, 3)),
    }
    assert reason in refused(state, Propose(**(good | changes)))
    assert state.view.placement == placement


# ---------------------------------------------------------------- recordings


def test_all_routers_record_and_the_answer_says_what_each_did() -> None:
    state, _ = mesh()
    effects = state.received(ADMIN, RecordLoad(action="start"), 1.0)
    assert sent(effects, ADMIN) == []
    (told,) = sent(effects, b"r0")
    assert isinstance(told, Record)
    answer = Recorded(id="r0", incarnation=1, command=told.command, recording=True, steps=4)
    (detail,) = sent(state.received(b"r0", answer, 1.2), ADMIN)
    assert isinstance(detail, RecordDetail)
    (router,) = detail.routers
    assert (router.router, router.recording, router.steps) == ("r0", True, 4)


def test_a_silent_router_keeps_nobody_waiting_for_ever() -> None:
    state, _ = mesh()
    state.received(ADMIN, RecordLoad(action="dump"), 1.0)
    effects = [effect for tick in range(14) for effect in state.tick(1.0 + tick / 2)]
    assert len([m for m in sent(effects, b"r0") if isinstance(m, Record)]) >= 3
    (detail,) = sent(effects, ADMIN)
    assert isinstance(detail, RecordDetail)
    assert detail.routers[0].error


def test_without_a_router_there_is_nothing_to_record() -> None:
    state = coordinator(SHAPE)
    placed(state)
    assert refused(state, RecordLoad(action="start")) == "no router is there to record"
