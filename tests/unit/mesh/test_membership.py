from __future__ import annotations

import msgspec
import pytest

from mesh.membership import (
    Admit,
    AskHello,
    Changed,
    Disconnected,
    Effect,
    Event,
    Membership,
    Refuse,
    Rules,
    Tick,
    step,
)
from mesh.messages import Goodbye, Heartbeat, Hello, Load, MemberState
from mesh.settings import PlannerSettings

RULES = Rules(model_digest="d1", suspect_after_s=1.5, dead_after_s=5.0, tick_s=0.5)


def _hello(incarnation: int = 1, id_: str = "expert-0", **fields: object) -> Hello:
    return Hello(
        **{
            "id": id_, "role": "expert", "incarnation": incarnation, "pid": 1, "host": "h",
            "model_digest": "d1", **fields,
        }
    )  # fmt: skip


def _beat(state: MemberState = "ready", incarnation: int = 1, **fields: object) -> Heartbeat:
    base = {"id": "expert-0", "incarnation": incarnation, "state": state, "load": Load()}
    return Heartbeat(**{**base, **fields})


class Planner:
    """A membership, its clock, and the effects of the last event."""

    def __init__(self) -> None:
        self.membership = Membership()
        self.now_s = 100.0
        self.effects: tuple[Effect, ...] = ()

    def on(self, *events: Event) -> tuple[Effect, ...]:
        for event in events:
            before = self.membership
            frozen = msgspec.to_builtins(before)
            self.membership, self.effects = step(before, event, self.now_s, RULES)
            assert msgspec.to_builtins(before) == frozen, "a step changes nothing in place"
            self.membership.check()
        return self.effects

    def wait(self, seconds: float) -> list[Effect]:
        """Tick as the planner does until that much time has passed."""
        seen: list[Effect] = []
        end = self.now_s + seconds
        while self.now_s < end:
            self.now_s = min(end, self.now_s + RULES.tick_s)
            seen.extend(self.on(Tick()))
        return seen

    @property
    def state(self) -> MemberState:
        return self.membership.records["expert-0"].state


@pytest.fixture
def planner() -> Planner:
    planner = Planner()
    planner.on(Tick())
    return planner


def test_a_hello_is_admitted_as_joining(planner: Planner) -> None:
    assert planner.on(_hello()) == (
        Admit("expert-0", 1),
        Changed("expert-0", 1, None, "joining"),
    )


def test_a_member_is_what_its_heartbeats_say(planner: Planner) -> None:
    planner.on(_hello())
    assert planner.on(_beat("loading", progress=0.5, detail="reading")) == (
        Changed("expert-0", 1, "joining", "loading"),
    )
    (member,) = planner.membership.members()
    assert (member.state, member.progress, member.detail) == ("loading", 0.5, "reading")
    assert planner.on(_beat("ready")) == (Changed("expert-0", 1, "loading", "ready"),)
    assert planner.on(_beat("ready", load=Load(step=4), progress=0.9)) == ()
    (member,) = planner.membership.members()
    assert member.load == Load(step=4)


def test_a_repeated_hello_changes_nothing_but_is_answered(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"))
    assert planner.on(_hello()) == (Admit("expert-0", 1),)
    assert planner.state == "ready"
    assert planner.on(_hello(lanes="/new")) == (
        Admit("expert-0", 1),
        Changed("expert-0", 1, "ready", "ready"),
    )


def test_a_heartbeat_of_a_stranger_is_asked_for_hello(planner: Planner) -> None:
    assert planner.on(_beat()) == (AskHello("expert-0"),)
    planner.on(_hello(1))
    assert planner.on(_beat(incarnation=2)) == (AskHello("expert-0"),)


def test_silence_makes_a_suspect_and_a_heartbeat_refutes_it(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"))
    assert planner.wait(1.0) == []
    assert planner.wait(0.5) == [Changed("expert-0", 1, "ready", "suspect")]
    assert planner.wait(1.0) == []
    assert planner.on(_beat("ready")) == (Changed("expert-0", 1, "suspect", "ready"),)


def test_long_silence_is_death_and_death_is_final(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"))
    changes = planner.wait(5.0)
    assert changes == [
        Changed("expert-0", 1, "ready", "suspect"),
        Changed("expert-0", 1, "suspect", "dead"),
    ]
    for event in (_beat("ready"), _hello(1), _beat(incarnation=0), _hello(0)):
        (refusal,) = planner.on(event)
        assert isinstance(refusal, Refuse)
        assert "fenced" in refusal.reason
        assert not refusal.retry
    assert planner.state == "dead"
    assert planner.on(Goodbye(id="expert-0", incarnation=1)) == ()


def test_a_new_process_of_a_dead_id_joins(planner: Planner) -> None:
    planner.on(_hello())
    planner.wait(5.0)
    assert planner.on(_hello(2)) == (
        Admit("expert-0", 1),
        Changed("expert-0", 2, None, "joining"),
    )
    assert planner.on(_beat("ready", incarnation=2)) == (
        Changed("expert-0", 2, "joining", "ready"),
    )


def test_a_newer_process_replaces_a_live_one_and_fences_it(planner: Planner) -> None:
    planner.on(_hello(1), _beat("ready"))
    assert planner.on(_hello(2)) == (
        Changed("expert-0", 1, "ready", "dead"),
        Admit("expert-0", 1),
        Changed("expert-0", 2, None, "joining"),
    )
    (refusal,) = planner.on(_beat("ready", incarnation=1))
    assert isinstance(refusal, Refuse)
    assert planner.membership.records["expert-0"].hello.incarnation == 2


def test_a_closed_connection_makes_a_suspect_at_once_then_dead(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"))
    assert planner.on(Disconnected("expert-0", 1)) == (Changed("expert-0", 1, "ready", "suspect"),)
    assert planner.wait(1.0) == [Changed("expert-0", 1, "suspect", "dead")]
    assert planner.membership.members()[0].detail == "connection closed"


def test_on_another_host_a_connection_that_stays_closed_is_silence(planner: Planner) -> None:
    """When a cut is over, the end of the old connection may come seconds before the new one."""
    far = _hello(host_id="far")
    planner.on(far, _beat("ready"), Disconnected("expert-0", 1))
    assert planner.wait(1.0) == [Changed("expert-0", 1, "suspect", "suspect")]
    assert planner.wait(2.0) == []
    assert planner.on(far) == (Admit("expert-0", 1), Changed("expert-0", 1, "suspect", "ready"))
    planner.on(Disconnected("expert-0", 1))
    assert Changed("expert-0", 1, "suspect", "dead") in planner.wait(5.0)


def test_nobody_waits_for_a_process_that_has_ended(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"))
    gone = Disconnected("expert-0", 1, ended=True)
    assert planner.on(gone) == (Changed("expert-0", 1, "ready", "dead"),)
    assert planner.on(gone) == ()
    assert planner.membership.members()[0].detail == "its process ended"
    (refusal,) = planner.on(_hello())
    assert isinstance(refusal, Refuse)


def test_a_member_that_reconnects_in_time_is_kept(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"), Disconnected("expert-0", 1))
    assert planner.on(_hello()) == (
        Admit("expert-0", 1),
        Changed("expert-0", 1, "suspect", "ready"),
    )
    assert planner.wait(1.0) == []


def test_an_old_connections_close_does_not_touch_a_newer_process(planner: Planner) -> None:
    planner.on(_hello(1), _hello(2))
    assert planner.on(Disconnected("expert-0", 1)) == ()
    assert planner.on(Disconnected("expert-9", 1)) == ()
    assert planner.state == "joining"


def test_goodbye_leaves_at_once_and_is_final(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"))
    assert planner.on(Goodbye(id="expert-0", incarnation=1, reason="stopped")) == (
        Changed("expert-0", 1, "ready", "left"),
    )
    assert planner.on(Disconnected("expert-0", 1)) == ()
    (refusal,) = planner.on(_beat("ready"))
    assert isinstance(refusal, Refuse)


def test_the_dead_are_shown_for_a_while_then_forgotten_but_stay_fenced(planner: Planner) -> None:
    planner.on(_hello())
    planner.wait(5.0)
    assert planner.wait(59.0) == []
    assert planner.wait(2.0) == [Changed("expert-0", 1, "dead", None)]
    assert planner.membership.members() == ()
    (refusal,) = planner.on(_hello(1))
    assert isinstance(refusal, Refuse)


def test_a_planner_that_slept_does_not_kill_the_silent(planner: Planner) -> None:
    planner.on(_hello(), _beat("ready"))
    planner.now_s += 60.0
    assert planner.on(Tick()) == ()
    assert planner.state == "ready"
    assert planner.wait(5.0) == [
        Changed("expert-0", 1, "ready", "suspect"),
        Changed("expert-0", 1, "suspect", "dead"),
    ], "its own silence still counts"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_digest": "d2"}, "precision: expert-0 has loaded d2, this mesh serves d1"),
        ({"model_digest": ""}, "precision: expert-0 has loaded none"),
        ({"protocol_min": 2, "protocol_max": 3}, "no common protocol: expert-0 speaks 2 to 3"),
        ({"protocol_min": 0, "protocol_max": 0}, "no common protocol"),
        ({"role": "planner"}, "a planner is no member"),
        ({"role": "admin"}, "a admin is no member"),
    ],
)
def test_a_process_that_does_not_fit_is_refused_for_good(
    planner: Planner, fields: dict, reason: str
) -> None:
    (refusal,) = planner.on(_hello(**fields))
    assert isinstance(refusal, Refuse)
    assert reason in refusal.reason
    assert not refusal.retry
    assert planner.membership.records == {}


def test_a_refused_process_does_not_displace_the_one_that_serves(planner: Planner) -> None:
    planner.on(_hello(1), _beat("ready"))
    planner.on(_hello(2, model_digest="d2"))
    assert planner.on(_beat("ready")) == ()


def test_the_newest_common_protocol_is_chosen(planner: Planner) -> None:
    assert planner.on(_hello(protocol_min=1, protocol_max=9))[0] == Admit("expert-0", 1)


@pytest.mark.parametrize("state", ["suspect", "dead", "left"])
def test_a_member_cannot_pass_judgement_on_itself(planner: Planner, state: MemberState) -> None:
    planner.on(_hello())
    (refusal,) = planner.on(_beat(state))
    assert isinstance(refusal, Refuse)
    assert "accepted: draining, joining, loading, ready" in refusal.reason
    assert planner.state == "joining"


def test_a_full_mesh_asks_to_try_again() -> None:
    rules = msgspec.structs.replace(RULES, max_members=1)
    membership, _ = step(Membership(), _hello(id_="a"), 0.0, rules)
    _, effects = step(membership, _hello(id_="b"), 0.0, rules)
    assert effects == (Refuse("b", "the mesh is full: 1 members", retry=True),)
    _, effects = step(membership, _hello(2, id_="a"), 0.0, rules)
    assert Admit("a", 1) in effects, "a restart takes no new place"


def test_members_are_listed_by_role_and_id(planner: Planner) -> None:
    planner.on(
        _hello(id_="e1"),
        _hello(id_="e0"),
        _hello(id_="r0", role="router"),
        _hello(id_="g0", role="gateway"),
    )
    assert [member.id for member in planner.membership.members()] == ["g0", "r0", "e0", "e1"]


def test_rules_come_from_the_settings() -> None:
    rules = Rules.of(PlannerSettings(), "d1")
    assert (rules.suspect_after_s, rules.dead_after_s, rules.tick_s) == (1.2, 5.0, 0.2)
