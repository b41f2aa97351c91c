from __future__ import annotations

import msgspec

from mesh.messages import (
    AssignSlots,
    GetPlan,
    GetStatus,
    GetView,
    Goodbye,
    LoadReport,
    PlanDetail,
    Refused,
    SetMode,
    SlotFault,
    SlotsReady,
    Status,
    Unknown,
    View,
    Welcome,
)
from mesh.placement import local_slots, unserved
from planner_svc.coordinator import SETTLE_S, Coordinator
from planner_svc.decide import Orders
from planner_svc.effects import Effect, Keep, Note, Publish, Send, Think
from planner_svc.moves import ModelShape
from planner_svc.worth import think
from tests.support import planner
from tests.support.planner import (
    assigned,
    beat,
    done,
    hello,
    obeyed,
    placed,
    policy,
    published,
    sent,
)

SHAPE = ModelShape((1, 2), 4)


def coordinator(**changes: object) -> Coordinator:
    """One that started at second 0 and plans nothing of its own accord."""
    return planner.coordinator(SHAPE, **({"mode": "off"} | changes))


def acknowledge(
    state: Coordinator, peer: bytes, command: AssignSlots, now: float, incarnation: int = 1
) -> list[Effect]:
    message = SlotsReady(
        id=peer.decode(), incarnation=incarnation, command=command.command, epoch=command.epoch
    )
    effects = state.received(peer, message, now)
    state.check()
    return effects


def only_e0_speaks(state: Coordinator, since: float, until: float) -> list[Effect]:
    """Time passes as in a planner's process; returns all effects."""
    effects: list[Effect] = []
    now = since
    while now < until:
        now += 0.2
        effects += obeyed(state, state.received(b"e0", beat("e0"), now), now)
        effects += obeyed(state, state.tick(now), now)
        state.check()
    return effects


def status(state: Coordinator, now: float = 0.0) -> Status:
    (answer,) = sent(state.received(b"admin", GetStatus(), now), b"admin")
    assert isinstance(answer, Status)
    return answer


def plan(state: Coordinator) -> PlanDetail:
    (answer,) = sent(state.received(b"admin", GetPlan(), 0.0), b"admin")
    assert isinstance(answer, PlanDetail)
    return answer


def test_a_member_is_welcomed_and_the_new_view_broadcast() -> None:
    state = coordinator()
    effects = state.received(b"p", hello("e0"), 0.0)
    assert sent(effects, b"p") == [
        Welcome(protocol=1, heartbeat_ms=500, broadcast="ipc://b"),
    ]
    (view,) = published(effects)
    assert view.version == 1001
    assert [(m.id, m.role, m.state) for m in view.members] == [
        ("planner", "planner", "ready"),
        ("e0", "expert", "joining"),
    ]
    assert sent(state.received(b"p", GetView(), 0.0), b"p") == [view]


def test_another_model_is_refused_for_good() -> None:
    state = coordinator()
    (refused,) = sent(state.received(b"p", hello("e0", digest="other"), 0.0), b"p")
    assert isinstance(refused, Refused)
    assert not refused.retry
    assert "other" in refused.reason
    assert state.view.version == 1000


def test_a_stranger_is_asked_for_its_hello() -> None:
    state = coordinator()
    for message in (
        beat("e0"),
        SlotsReady(id="e0", incarnation=1, command=1, epoch=1),
        LoadReport(id="e0", incarnation=1, counts=()),
        Goodbye(id="e0", incarnation=1),
    ):
        assert state.received(b"p", message, 0.0) == [Send(b"p", Unknown())]
    state.received(b"p", hello("e0"), 0.0)
    assert sent(state.received(b"p", beat("e9"), 0.0), b"p") == [Unknown()]
    assert sent(state.received(b"other", beat("e0"), 0.0), b"other") == [Unknown()]


def test_the_first_placement_is_committed_when_all_ranks_acknowledge() -> None:
    state = coordinator()
    state.received(b"e0", hello("e0"), 0.0)
    commands = assigned(state.received(b"e1", hello("e1"), 0.0))
    assert set(commands) == {b"e0", b"e1"}
    acknowledge(state, b"e0", commands[b"e0"], 1.0)
    assert state.view.placement is None
    effects = acknowledge(state, b"e1", commands[b"e1"], 1.0)
    (view,) = published(effects)
    assert view.placement is not None
    assert view.placement.ranks == ("e0", "e1")
    assert Keep(view.placement) in effects
    assert state.epoch == 1


def test_an_old_view_is_repaired_by_the_heartbeat() -> None:
    state = coordinator()
    state.received(b"e0", hello("e0"), 0.0)
    effects = state.received(b"e0", beat("e0", version=3), 0.1)
    assert sent(effects, b"e0") == [state.view] == published(effects)
    effects = state.received(b"e0", beat("e0", version=3), 0.1)
    assert sent(effects, b"e0") == [state.view]
    now = state.view.version
    assert sent(state.received(b"e0", beat("e0", version=now), 0.2), b"e0") == []


def test_status_says_what_the_mesh_waits_for_until_it_can_run_a_token() -> None:
    state = coordinator()
    assert "no expert worker" in status(state).reason
    state.received(b"e0", hello("e0"), 0.0)
    assert "1 of 2" in status(state).reason
    commands = assigned(state.received(b"e1", hello("e1"), 0.0))
    state.received(b"e0", beat("e0", "loading"), 0.0)
    assert "loading experts" in status(state).reason
    for peer, command in commands.items():
        acknowledge(state, peer, command, 0.0)
    state.received(b"e0", beat("e0"), 0.0)
    assert "4 experts are served by nobody, waiting for: e1 (joining)" in status(state).reason
    state.received(b"e1", beat("e1"), 0.0)
    assert status(state).reason == "no router is ready"
    state.received(b"r0", hello("r0", "router"), 0.0)
    assert "r0 (joining)" in status(state).reason
    assert not status(state).ready
    state.received(b"r0", beat("r0"), 0.0)
    assert status(state).ready
    assert status(state).reason == ""
    assert status(state).epoch == 1


def test_a_failed_assignment_is_named_in_the_status() -> None:
    state = coordinator(experts=1)
    (command,) = assigned(state.received(b"e0", hello("e0"), 0.0)).values()
    failed = SlotsReady(
        id="e0", incarnation=1, command=command.command, epoch=1, error="file truncated"
    )
    effects = state.received(b"e0", failed, 0.0)
    assert any(isinstance(e, Note) and e.event == "slots.failed" for e in effects)
    assert status(state).reason == "e0: file truncated"


def test_a_lost_connection_makes_a_suspect_then_dead_and_survivors_take_its_experts() -> None:
    state = coordinator()
    placed(state)
    (view,) = published(state.closed(b"e1", 1.0))
    assert view.members[-1].state == "suspect"
    only_e0_speaks(state, 1.0, 2.4)
    assert state.view.members[-1].state == "dead"
    assert state.view.placement is not None
    assert state.view.placement.ranks == ("e0",)
    assert not unserved(state.view.placement, ["e0"])


def test_a_lost_connection_to_another_host_costs_a_worker_what_silence_does() -> None:
    state = coordinator()
    placed(state)
    far = msgspec.structs.replace(hello("e1"), host_id="far")
    state.received(b"e1", far, 0.9)
    state.closed(b"e1", 1.0)
    only_e0_speaks(state, 1.0, 2.4)
    assert state.view.members[-1].state == "suspect"
    assert state.view.placement is not None
    assert not unserved(state.view.placement, ["e0"])
    # It has opened another connection, as soon as the network let it.
    obeyed(state, state.received(b"e1", far, 2.5), 2.5)
    assert state.view.members[-1].state == "ready"


def test_what_a_silent_worker_holds_is_placed_elsewhere_before_it_counts_as_dead() -> None:
    state = coordinator()
    before = placed(state)
    effects = only_e0_speaks(state, 0.0, 1.4)
    assert any(isinstance(effect, Note) and effect.event == "ranks.doubted" for effect in effects)
    assert b"e1" not in assigned(effects)
    assert state.view.members[-1].state == "suspect"
    after = state.view.placement
    assert after is not None
    assert after.ranks == ("e0",)
    assert not unserved(after, ["e0"])
    # It was only slow: it serves again, and has given up nothing before routers knew.
    effects = obeyed(state, state.received(b"e1", beat("e1"), 1.6), 1.6)
    obeyed(state, state.tick(1.7), 1.7)
    again = state.view.placement
    assert again is not None
    assert again.ranks == before.ranks
    assert state.view.members[-1].state == "ready"


def test_a_silent_worker_whose_experts_others_hold_keeps_them() -> None:
    state = coordinator(redundant_slots=4)
    before = placed(state)
    only_e0_speaks(state, 0.0, 1.4)
    assert state.view.members[-1].state == "suspect"
    assert state.view.placement == before


def test_the_only_worker_is_not_doubted() -> None:
    state = coordinator(experts=1)
    state.received(b"e0", hello("e0"), 0.0)
    obeyed(state, state.received(b"e0", beat("e0"), 0.0), 0.0)
    before = state.view.placement
    assert not events(state.tick(2.0))[1:]
    assert state.view.placement == before


def test_a_new_process_of_a_dead_rank_gets_its_slots_again() -> None:
    state = coordinator()
    placement = placed(state)
    effects = state.received(b"e1-again", hello("e1", incarnation=2), 3.0)
    command = assigned(effects)[b"e1-again"]
    assert command.slots == local_slots(placement, "e1")
    assert b"e0" not in assigned(effects)
    state.check()
    # The old process is fenced, whatever connection it still has.
    assert sent(state.received(b"e1", beat("e1"), 3.1), b"e1") == [Unknown()]
    (refused,) = sent(state.received(b"e1", hello("e1", incarnation=1), 3.2), b"e1")
    assert isinstance(refused, Refused)
    # Its late farewell takes nothing from its successor.
    state.closed(b"e1", 3.3)
    assert state.view.members[-1].state == "joining"


def test_a_reconnected_member_is_known_by_its_new_connection_alone() -> None:
    state = coordinator()
    placed(state)
    state.received(b"e1-b", hello("e1"), 1.0)
    state.closed(b"e1", 1.1)
    state.check()
    assert [m.state for m in state.view.members[1:]] == ["ready", "ready"]
    effects = state.received(b"e1-b", beat("e1"), 1.2)
    assert sent(effects, b"e1-b") == [state.view]


def test_a_member_that_says_goodbye_has_left() -> None:
    state = coordinator()
    placed(state)
    state.received(b"e1", Goodbye(id="e1", incarnation=1, reason="stopped"), 1.0)
    assert state.view.members[-1].state == "left"
    assert "e1 (left" in status(state).reason


def test_a_restarted_planner_takes_the_placement_from_its_members() -> None:
    old = coordinator()
    placement = msgspec.structs.replace(placed(old), epoch=5)
    state = coordinator(first=9000)
    state.received(b"r0", hello("r0", "router", placement=placement), 0.0)
    assert not assigned(state.received(b"e0", hello("e0", placement=placement), 0.0))
    state.received(b"e0", beat("e0"), SETTLE_S - 0.5)
    effects = state.tick(SETTLE_S)
    commands = assigned(effects)
    assert commands[b"e0"].epoch == 5
    assert commands[b"e0"].slots == local_slots(placement, "e0")
    (view,) = published(effects)
    assert view.placement == placement
    assert view.version > old.view.version


def test_a_restarted_planner_says_who_is_there_only_when_all_have_said_hello_again() -> None:
    placement = placed(coordinator())
    state = coordinator(first=9000)
    members = {b"r0": "router", b"e0": "expert", b"g0": "gateway", b"e1": "expert"}
    said: list[Effect] = []
    for number, (peer, role) in enumerate(members.items()):
        at = number * SETTLE_S / 5
        id_ = peer.decode()
        said += state.received(peer, hello(id_, role, placement=placement), at)
        said += state.received(peer, GetView(), at)
        said += state.received(peer, beat(id_, version=123), at)
        said += state.tick(at)
    assert not [e for e in said if isinstance(e, Publish)]
    assert not [e for e in said if isinstance(e, Send) and isinstance(e.message, View)]
    assert status(state).epoch == placement.epoch  # a person who asks is told what is known

    for peer in members:
        state.received(peer, beat(peer.decode(), version=123), 0.9 * SETTLE_S)
    effects = state.tick(SETTLE_S)
    (view,) = published(effects)
    assert {m.id for m in view.members} == {"planner", "r0", "e0", "e1", "g0"}
    assert {m.state for m in view.members} == {"ready"}
    # Each gets it on its own connection too, where it counts whatever its number.
    assert all(sent(effects, peer).count(view) == 1 for peer in members)
    assert sent(state.received(b"r0", GetView(), SETTLE_S), b"r0") == [view]


def test_a_planner_that_is_started_again_knows_that_the_mesh_is_older() -> None:
    # The first to say Hello may be a process that has just started and knows no placement.
    placement = placed(coordinator())
    state = coordinator(first=9000, stored=placement, orders=Orders())
    assert published(state.received(b"e1", hello("e1", incarnation=2), 0.0)) == []
    assert published(state.received(b"r0", hello("r0", "router", placement=placement), 0.1)) == []
    (view,) = published(state.tick(SETTLE_S))
    assert {m.id for m in view.members} == {"planner", "e1", "r0"}


def test_a_settled_planner_holds_nothing_back() -> None:
    state = coordinator()
    placement = placed(state)
    late = hello("r0", "router", placement=placement)
    assert published(state.received(b"r0", late, SETTLE_S + 1))


def test_load_reports_add_up_to_balancedness_and_bad_ones_are_counted() -> None:
    state = coordinator()
    placement = placed(state)
    state.received(b"r0", hello("r0", "router"), 0.0)
    assert status(state).balancedness == 1.0
    # All tokens to one expert of each layer: one rank of two is idle.
    counts = ((8, 0, 0, 0), (8, 0, 0, 0))
    report = LoadReport(id="r0", incarnation=1, counts=counts, tokens=8)
    state.received(b"r0", report, 0.0)
    assert placement.ranks == ("e0", "e1")
    assert status(state).balancedness == 0.5
    assert status(state).tokens == 8
    state.received(b"r0", msgspec.structs.replace(report, counts=((1, 2),)), 0.0)
    assert state.tallies.dropped_reports == 1
    assert status(state).tokens == 8
    assert status(state, now=1000.0).balancedness == 1.0


def test_what_a_worker_loaded_and_what_it_could_not_is_logged() -> None:
    state = coordinator(experts=1)
    (command,) = assigned(state.received(b"e0", hello("e0"), 0.0)).values()
    ready = done(
        "e0", command, loaded=7, from_peers=2, loaded_bytes=700, seconds=0.25,
        faults=(SlotFault(1, 0, 0, "checksum differs"),),
    )  # fmt: skip
    effects = state.received(b"e0", ready, 0.0)
    (note,) = [e for e in effects if isinstance(e, Note) and e.event == "slots.acknowledged"]
    assert note.values == {
        "member": "e0", "epoch": command.epoch, "loaded": 7, "from_peers": 2, "seconds": 0.25,
        "faults": 1,
    }  # fmt: skip
    assert state.loaded_bytes == 700
    assert "checksum differs" in plan(state).faults[0]


# ---------------------------------------------------------------- moving by load

SKEWED = ((900, 10, 900, 10), (900, 10, 900, 10))  # the uniform placement has 0 and 2 on one rank


def loaded_mesh(**changes: object) -> tuple[Coordinator, list[Effect]]:
    """Two expert workers and a router that has reported ``SKEWED``, and what that led to."""
    state = coordinator(**({"mode": "auto", "interval_s": 2.0} | changes))
    placement = placed(state)
    state.received(b"r0", hello("r0", "router"), 0.0)
    state.received(b"r0", beat("r0", epoch=placement.epoch), 0.0)
    report = LoadReport(id="r0", incarnation=1, counts=SKEWED, tokens=5_000)
    state.received(b"r0", report, 1.0)
    for member in ("e0", "e1", "r0"):
        state.received(member.encode(), beat(member, epoch=placement.epoch), 1.5)
    return state, state.tick(2.0)


def events(effects: list[Effect]) -> list[str]:
    return [e.event for e in effects if isinstance(e, Note) and e.event.startswith("plan.")]


def test_skewed_loads_move_experts_until_they_are_even() -> None:
    state, effects = loaded_mesh()
    before = status(state).balancedness
    done_ = obeyed(state, effects, 2.0, policy())
    assert events(done_)[0] == "plan.proposed"
    assert events(done_)[-1] == "plan.done"
    assert "plan.committed" in events(done_)
    (proposed,) = [e for e in done_ if isinstance(e, Note) and e.event == "plan.proposed"]
    assert proposed.values["moves"] == 4
    assert proposed.values["gain_s"] > proposed.values["cost_s"]
    assert status(state, 2.0).balancedness > before
    assert status(state, 2.0).phase == ""
    assert state.plans_by_verdict["moved"] == 1


def test_old_copies_stay_until_every_router_has_switched() -> None:
    state, effects = loaded_mesh()
    (thinking,) = [effect for effect in effects if isinstance(effect, Think)]
    state.received(b"r1", hello("r1", "router"), 2.0)
    state.received(b"r1", beat("r1", epoch=1), 2.0)
    effects = state.thought(think(policy(), thinking.question), 0.01, 2.0)
    assert status(state).phase == "loading"
    for peer, command in assigned(effects).items():
        effects += acknowledge(state, peer, command, 2.0)
    assert status(state).phase == "committing"
    epoch = state.epoch
    for router in ("r0", "r1"):
        assert status(state).phase == "committing"
        state.received(router.encode(), beat(router, epoch=epoch), 2.1)
    assert status(state).phase == "draining"


def test_a_router_that_dies_is_not_waited_for() -> None:
    state, effects = loaded_mesh()
    (thinking,) = [effect for effect in effects if isinstance(effect, Think)]
    effects = state.thought(think(policy(), thinking.question), 0.01, 2.0)
    for peer, command in assigned(effects).items():
        acknowledge(state, peer, command, 2.0)
    assert status(state).phase == "committing"
    state.received(b"r0", Goodbye(id="r0", incarnation=1), 2.1)
    assert status(state).phase == "draining"


def test_a_mode_that_moves_nothing_stops_a_move_under_way() -> None:
    state, effects = loaded_mesh()
    (thinking,) = [effect for effect in effects if isinstance(effect, Think)]
    state.thought(think(policy(), thinking.question), 0.01, 2.0)
    assert status(state).phase == "loading"
    effects = state.received(b"admin", SetMode(mode="advise"), 2.5)
    (answer,) = sent(effects, b"admin")
    assert isinstance(answer, PlanDetail)
    assert (answer.verdict, answer.mode, answer.phase) == ("failed", "advise", "")
    assert answer.reason.startswith("the mode was set to advise; ")
    assert "plan.failed" in events(effects)


def test_idle_planners_plan_nothing_and_say_why_once() -> None:
    state = coordinator(mode="auto", interval_s=5.0)
    placed(state)
    effects = [effect for tick in range(60) for effect in state.tick(float(tick))]
    assert not [effect for effect in effects if isinstance(effect, Think)]
    assert events(effects) == []  # it was said with the first placement
    assert "0 tokens in the window" in plan(state).reason


def test_a_worker_that_drains_is_emptied() -> None:
    state = coordinator(experts=3)
    placed(state, ("e0", "e1", "e2"))
    effects = obeyed(state, state.received(b"e1", beat("e1", "draining"), 1.0), 1.0)
    for tick in (1.5, 2.0, 2.5):
        effects += obeyed(state, state.tick(tick), tick)
    after = state.view.placement
    assert after is not None
    assert "e1" not in after.ranks or not any(map(any, local_slots(after, "e1")))
    assert not unserved(after, ["e0", "e2"])
