"""Membership under any order of joins, restarts, silences, lost connections and zombies."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mesh.membership import (
    FINAL,
    LIVE,
    TRANSITIONS,
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

IDS = st.sampled_from(["a", "b", "c"])
INCARNATIONS = st.integers(1, 5)
RULES = Rules(model_digest="d", suspect_after_s=1.5, dead_after_s=5.0, tick_s=0.5)


class MembershipMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership()
        self.now_s = 0.0
        self.shown: dict[str, tuple[int, MemberState]] = {}
        """What a reader who only follows ``Changed`` believes."""
        self.ended: dict[str, int] = {}
        """Highest incarnation that we were told is over."""

    def _on(self, event: Event) -> tuple[Effect, ...]:
        self.membership, effects = step(self.membership, event, self.now_s, RULES)
        for effect in effects:
            if isinstance(effect, Changed):
                self._follow(effect)
            elif isinstance(effect, Admit):
                assert isinstance(event, Hello)
                assert event.incarnation > self.ended.get(event.id, 0)
        return effects

    def _follow(self, change: Changed) -> None:
        believed = self.shown.get(change.id)
        if change.before is None:
            assert believed is None or believed[1] in FINAL, "a live process is ended first"
            assert change.incarnation > self.ended.get(change.id, 0)
        else:
            assert believed == (change.incarnation, change.before)
        if change.after is None:
            assert change.before in FINAL, "only the dead and the left are forgotten"
            del self.shown[change.id]
            return
        if change.before is not None and change.before != change.after:
            assert change.after in TRANSITIONS[change.before]
        self.shown[change.id] = (change.incarnation, change.after)
        if change.after in FINAL:
            self.ended[change.id] = max(change.incarnation, self.ended.get(change.id, 0))

    def _current(self, id_: str, incarnation: int) -> bool:
        return self.shown.get(id_, (0, ""))[0] == incarnation

    @rule(id_=IDS, incarnation=INCARNATIONS)
    def hello(self, id_: str, incarnation: int) -> None:
        known = self.shown.get(id_, (0, "joining"))[0]
        ended = self.ended.get(id_, 0)
        effects = self._on(
            Hello(id=id_, role="expert", incarnation=incarnation, pid=1, host="h", model_digest="d")
        )
        if incarnation > ended and incarnation >= known:
            assert Admit(id_, 1) in effects
            assert self.shown[id_][0] == incarnation
            assert self.shown[id_][1] in LIVE
        else:
            assert [type(effect) for effect in effects] == [Refuse]

    @rule(id_=IDS, incarnation=INCARNATIONS, state=st.sampled_from(sorted(LIVE)))
    def heartbeat(self, id_: str, incarnation: int, state: MemberState) -> None:
        before = self.shown.get(id_)
        effects = self._on(Heartbeat(id=id_, incarnation=incarnation, state=state, load=Load()))
        if incarnation <= self.ended.get(id_, 0) or (before and incarnation < before[0]):
            assert [type(effect) for effect in effects] == [Refuse], "a zombie is fenced"
            assert self.shown.get(id_) == before
        elif before and before[0] == incarnation:
            assert self.shown[id_] == (incarnation, state), "its own word counts, suspect or not"
        else:
            assert effects == (AskHello(id_),)

    @rule(id_=IDS, incarnation=INCARNATIONS)
    def goodbye(self, id_: str, incarnation: int) -> None:
        live = self._current(id_, incarnation) and self.shown[id_][1] not in FINAL
        self._on(Goodbye(id=id_, incarnation=incarnation))
        if live:
            assert self.shown[id_] == (incarnation, "left")

    @rule(id_=IDS, incarnation=INCARNATIONS, ended=st.booleans())
    def disconnected(self, id_: str, incarnation: int, *, ended: bool) -> None:
        live = self._current(id_, incarnation) and self.shown[id_][1] not in FINAL
        before = self.shown.get(id_)
        self._on(Disconnected(id_, incarnation, ended))
        after = (incarnation, "dead" if ended else "suspect")
        assert self.shown.get(id_) == (after if live else before)

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += RULES.tick_s
            self._on(Tick())

    @rule(seconds=st.floats(1.5, 1000.0))
    def planner_sleeps(self, seconds: float) -> None:
        alive = {id_ for id_, (_, state) in self.shown.items() if state not in FINAL}
        self.now_s += RULES.tick_s
        self._on(Tick())
        alive = {id_ for id_ in alive if self.shown[id_][1] not in FINAL}
        self.now_s += seconds
        self._on(Tick())
        for id_ in alive:
            assert self.shown[id_][1] not in FINAL, "our own sleep kills nobody"

    @rule()
    def everyone_falls_silent(self) -> None:
        for _ in range(12):
            self.now_s += RULES.tick_s
            self._on(Tick())
        assert all(state in FINAL for _, state in self.shown.values())

    @invariant()
    def state_is_sound(self) -> None:
        self.membership.check()

    @invariant()
    def the_changes_tell_the_whole_story(self) -> None:
        members = {m.id: (m.incarnation, m.state) for m in self.membership.members()}
        assert members == self.shown


MembershipMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestMembership = MembershipMachine.TestCase
