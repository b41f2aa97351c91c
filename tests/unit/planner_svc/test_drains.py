from __future__ import annotations

from typing import Any

from mesh.messages import AdminRefused, Drain, FromPlanner, GetStatus, PlanDetail, Status
from planner_svc.coordinator import SETTLE_S, Coordinator
from planner_svc.decide import Orders
from planner_svc.effects import Effect, KeepOrders
from planner_svc.moves import ModelShape
from tests.support.planner import beat, coordinator, hello, obeyed, placed, sent

SHAPE = ModelShape((1, 2), 4)
ADMIN = b"admin"


def mesh(workers: tuple[str, ...] = ("e0", "e1", "e2"), **more: Any) -> Coordinator:
    """Ready expert workers and the router r0."""
    state = coordinator(SHAPE, experts=len(workers), mode="off", **more)
    placement = placed(state, workers)
    add_router(state, "r0", placement.epoch)
    return state


def add_router(state: Coordinator, id_: str, epoch: int) -> None:
    state.received(id_.encode(), hello(id_, "router"), 0.0)
    state.received(id_.encode(), beat(id_, epoch=epoch), 0.0)


def settled(state: Coordinator, now: float) -> None:
    """Lets everything come to an end within half a second."""
    for tick in range(5):
        at = now + tick / 10
        obeyed(state, state.tick(at), at)


def ask(state: Coordinator, now: float = 0.1, **order: Any) -> tuple[FromPlanner, list[Effect]]:
    """The answer to a ``Drain``, and all that comes of it until everything is done."""
    effects = obeyed(state, state.received(ADMIN, Drain(**order), now), now)
    (answer,) = sent(effects, ADMIN)
    settled(state, now)
    return answer, effects


def states(state: Coordinator) -> dict[str, str]:
    return {member.id: member.state for member in state.view.members}


def on(state: Coordinator) -> set[str]:
    """Ranks of the placement."""
    assert state.view.placement is not None
    return set(state.view.placement.ranks)


def refusal(state: Coordinator, **order: Any) -> str:
    before = states(state)
    answer, _ = ask(state, **order)
    assert isinstance(answer, AdminRefused)
    assert states(state) == before
    return answer.reason


def test_a_worker_is_emptied_when_ordered_and_gets_a_share_again_when_that_is_undone() -> None:
    state = mesh()
    effects = state.received(ADMIN, Drain(member="e1"), 0.1)
    assert isinstance(sent(effects, ADMIN)[0], PlanDetail)
    (status,) = sent(state.received(ADMIN, GetStatus(), 0.1), ADMIN)
    assert isinstance(status, Status)
    assert status.moving == "drain"
    assert 0 == status.moved < status.to_move
    obeyed(state, effects, 0.1)
    settled(state, 0.1)
    assert states(state)["e1"] == "draining"
    assert on(state) == {"e0", "e2"}
    obeyed(state, state.received(b"e1", beat("e1"), 0.6), 0.6)  # it knows nothing of the order
    assert on(state) == {"e0", "e2"}

    ask(state, member="e1", undo=True, now=0.7)
    assert states(state)["e1"] == "ready"
    assert on(state) == {"e0", "e1", "e2"}


def test_an_order_taken_back_on_the_way_is_forgotten() -> None:
    state = mesh()
    state.received(ADMIN, Drain(member="e1"), 0.1)
    before = state.view.placement
    ask(state, member="e1", undo=True)
    assert before is not None
    assert on(state) == {"e0", "e1", "e2"}
    assert states(state)["e1"] == "ready"


def test_what_would_leave_requests_without_a_server_is_refused() -> None:
    state = mesh(("e0",))
    assert "e0 cannot drain: 4 experts a layer need 4 slots; 0 expert workers" in refusal(
        state, member="e0"
    )
    assert refusal(state, member="r0") == "r0 is the only router that takes requests"
    assert "expected one of e0, r0" in refusal(state, member="e9")
    add_router(state, "r1", state.epoch)
    answer, _ = ask(state, member="r0")
    assert isinstance(answer, PlanDetail)
    assert states(state) | {"r0": "draining", "r1": "ready"} == states(state)
    assert "only router" in refusal(state, member="r1")


def test_one_that_stops_by_itself_cannot_be_kept() -> None:
    state = mesh()
    obeyed(state, state.received(b"e1", beat("e1", "draining"), 0.1), 0.1)
    assert refusal(state, member="e1", undo=True) == "e1 was told to stop and cannot be kept"


def test_an_order_outlives_the_planner_and_ends_with_the_process() -> None:
    state = mesh()
    placement = state.view.placement
    _, effects = ask(state, member="e1")
    (kept,) = (effect.orders for effect in effects if isinstance(effect, KeepOrders))
    assert isinstance(kept, Orders)

    again = coordinator(SHAPE, experts=3, mode="off", orders=kept)
    now = SETTLE_S + 0.1
    for id_ in ("e0", "e1", "e2"):
        peer = id_.encode()
        obeyed(again, again.received(peer, hello(id_, placement=placement), now), now)
        obeyed(again, again.received(peer, beat(id_), now), now)
    for later in (SETTLE_S, SETTLE_S + 0.5):  # the roll-out listens for a while, too
        for id_ in ("e0", "e1", "e2"):
            obeyed(again, again.received(id_.encode(), beat(id_), now + later), now + later)
        settled(again, now + later)
    assert states(again)["e1"] == "draining"
    assert on(again) == {"e0", "e2"}

    now += SETTLE_S + 1
    for id_ in ("e0", "e2"):
        obeyed(again, again.received(id_.encode(), beat(id_), now), now)
    obeyed(again, again.received(b"e1", hello("e1", incarnation=2), now), now)
    obeyed(again, again.received(b"e1", beat("e1", incarnation=2), now), now)
    assert states(again)["e1"] == "ready"
    (status,) = sent(again.received(ADMIN, GetStatus(), now), ADMIN)
    assert isinstance(status, Status)
    assert status.moving == "join"
