"""Which placement is in force, and the safe way from it to the one that is wanted. Pure.

Time is an argument; what must be sent, kept or logged is returned by ``due``. Routers use the
*committed* placement. It changes by waves, each of which goes through these phases:

    loading      ranks fill spare slots, all that serves goes on serving; what fails is left out
    committing   the new placement is in force; copies it does not name serve on until every router
                 has reported its epoch
    draining     ranks give those copies up

A wave that is not answered within a phase's time is taken back before the commit and tried again
later; after it, it is only waited for. ``waves`` chooses the loads, ``sharing`` says where to go
when ranks come or go, ``move_to`` when the planner knows better.

What comes first: a promise of the committed placement that is broken (its rank died, or says that
a slot is empty). If other copies remain, the rest is committed at once and nothing waits. If not,
the lost experts are loaded by survivors in one urgent wave, without limit of slots or bytes, and
everything else waits. A rank that comes back while no such wave is under way takes its slots again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh.messages import Placement, SlotsReady
from mesh.placement import EMPTY
from planner_svc.holdings import Holdings
from planner_svc.moves import (
    Commit,
    Done,
    Failed,
    ModelShape,
    RolloutEffect,
    RolloutRules,
    Target,
    checked,
    fits,
)
from planner_svc.policies.problem import PlanError
from planner_svc.policies.uniform import slots_per_rank
from planner_svc.rank_state import RankState
from planner_svc.sharing import shared
from planner_svc.urgent import Urgent
from planner_svc.wave_runner import Phase, Wave, WaveRunner
from planner_svc.waves import (
    Load,
    StuckError,
    Wants,
    missing,
    most_filled,
    next_step,
    num_slots,
    rank_key,
    resized,
    trimmed,
    with_spare,
)

SETTLE_S = 2.0
"""How long a planner that is started again, or finds a placement in force, listens before it sends
commands: another member may know a newer one."""
ABSENT_S = 5.0
"""After how long a rank of that placement that has not said ``Hello`` counts as dead."""
RETRY_S = 5.0
"""Pause before loads that failed are tried again; it doubles with each failure."""
RETRY_MAX_S = 300.0
MAX_TRIES = 6
"""Failures of one load after which the target is given up."""
MAX_FAULTS = 32
"""Faults that are remembered."""


@dataclass(slots=True)
class _Goal:
    """Where the waves lead; ``asked``: by ``move_to``, so that its end is reported."""

    wants: Wants
    why: str
    asked: bool
    to_move: int
    tries: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    """(layer index, rank, expert) of a load -> how often it failed."""
    postponed: set[tuple[int, str, int]] = field(default_factory=set)
    """Loads that failed, until ``retry_at``."""
    retry_at: float = 0.0


class Rollout:
    """State of the placement; the planner feeds it events and carries out what ``due`` returns.

    ``stored`` is the plan of an earlier run: its epoch is never undercut, and it is used again
    when exactly its ranks and number of slots come back. ``first_command`` must grow from one start
    of the planner to the next, so that an old acknowledgement matches no new command. ``again``: an
    earlier start served this mesh, so that a member may know a placement that is in force.
    """

    def __init__(
        self,
        shape: ModelShape,
        rules: RolloutRules,
        *,
        stored: Placement | None,
        first_command: int,
        again: bool = False,
    ) -> None:
        self.shape = shape
        self.faults: deque[str] = deque(maxlen=MAX_FAULTS)
        """What went wrong lately, newest first."""
        self._rules = rules
        self._held = Holdings(shape.moe_layers, first_command)
        newest_epoch = 0 if stored is None else stored.epoch
        self._runner = WaveRunner(shape, rules, self._held, newest_epoch)
        usable = stored if stored is not None and fits(stored, shape) else None
        self._urgent = Urgent(shape, rules, self._held, self._runner, usable)
        self._goal: _Goal | None = None
        self._shared_among: frozenset[str] | None = None
        """Ranks for whom shares were last thought of."""
        self._unfinished = False
        """Shares were made, but maybe not carried out to the end."""
        self._adopted = False
        self._again = again
        self._settles_at = self._absent_at = 0.0
        self._found_epoch = 0
        """Of the placement found in force, until all routers use it."""

    # -------------------------------------------------------------- events

    def joined(self, rank: str, offered: int, bundles: str, now: float) -> None:
        """An expert worker said ``Hello``: a new process, unless the last one is not ``gone``."""
        if (state := self._held.ranks.get(rank)) is not None:
            state.greeted(offered, bundles, now)
            return
        wave = self._runner.wave
        # What survivors are loading already they may as well keep.
        restore = wave is None or not wave.loading_urgently
        self._held.joined(rank, offered, bundles, restore=restore)
        self._shared_among = None
        if self._urgent.waiting_since is None:
            self._urgent.waiting_since = now

    def ready(self, rank: str, *, is_ready: bool) -> None:
        """Whether an expert worker says that it serves what it holds."""
        if (state := self._held.ranks.get(rank)) is not None:
            state.ready = is_ready

    def silent(self, rank: str) -> None:
        """Nothing has been heard of an expert worker for a while: it may be dead, or only slow.

        What nobody else holds is placed elsewhere at once; it keeps the rest, as routers go round
        it themselves.
        """
        if (state := self._held.ranks.get(rank)) is not None:
            state.silent = True

    def heard(self, rank: str) -> None:
        """A silent worker speaks again. If others load what it holds, they need not."""
        state = self._held.ranks.get(rank)
        if state is None or not state.silent:
            return
        self._shared_among = None
        wave = self._runner.wave
        if self._held.heard(rank) and wave is not None and wave.loading_urgently:
            self._runner.end()

    def gone(self, rank: str, now: float) -> None:
        """An expert worker died or left."""
        if not self._held.gone(rank):
            return
        self._shared_among = None
        self._runner.alarms.pop("drain", None)
        self._runner.dropped(rank)
        if self.committed is None:
            self._runner.end()
            self._urgent.waiting_since = now
        if self._goal is not None and any(self._goal.wants.get(rank, ())):
            self._cancel(f"{rank} is gone")

    def drain(self, rank: str, *, only_if_possible: bool = False) -> None:
        """Move everything off the rank; it may leave when the placement names it no more.

        ``only_if_possible``: raise ``PlanError`` and do nothing if the others offer too few slots.
        """
        state = self._held.ranks.get(rank)
        if state is None or state.draining:
            return
        if only_if_possible:
            others = self._held.staying() - {rank}
            offered = [self._held.ranks[other].offered for other in others]
            slots_per_rank(self.shape.num_experts, 0, offered)
        state.draining = True
        self._shared_among = None

    def stay(self, rank: str) -> None:
        """Take ``drain`` back."""
        state = self._held.ranks.get(rank)
        if state is None or not state.draining:
            return
        state.draining = False
        self._shared_among, self._unfinished = None, True
        if self._goal is not None and not self._goal.asked:
            self._cancel(f"{rank} stays")

    def learned(self, placement: Placement) -> None:
        """A member knows ``placement``: the newest one survives the planner that made it."""
        if not fits(placement, self.shape):
            return
        stored = self._urgent.stored
        if stored is not None and stored.epoch > placement.epoch:
            placement = stored  # kept before anyone was told of it, and maybe nobody was
        self.saw_epoch(placement.epoch)
        if self.committed is None or placement.epoch > self.committed.epoch:
            self._held.learn(placement)
            self._runner.end()
            self._goal = None
            self._adopted = True

    def saw_epoch(self, epoch: int) -> None:
        """A member reports ``epoch``; a new placement gets a higher one."""
        self._runner.newest_epoch = max(self._runner.newest_epoch, epoch)

    def acknowledged(self, ready: SlotsReady, now: float) -> None:
        """One for a command that is not the rank's newest is ignored."""
        if self._held.answered(ready, now):
            self.faults.extendleft(_faults_of(ready.id, self._held.ranks[ready.id]))

    def router_at(self, router: str, epoch: int) -> None:
        """A live router uses the placement of ``epoch``; 0: none yet."""
        self._runner.routers[router] = epoch

    def router_gone(self, router: str) -> None:
        """It uses no slot any more."""
        self._runner.routers.pop(router, None)

    def move_to(self, target: Target) -> None:
        """Go there from now on, rather than to any earlier target. Raises ``PlanError`` when the
        ranks that are there cannot hold it; nothing has changed then.
        """
        if self.committed is None:
            raise PlanError("no experts have been placed yet")
        if self._runner.lacks(self._held.kept()):
            raise PlanError("some experts are served by nobody and come first")
        most = {rank: self._most(rank) for rank in self._held.staying()}
        self._set_goal(checked(target, self.shape, most), target.why, asked=True)

    def abandon(self) -> None:
        """Stop moving to the target of ``move_to``; what is committed stays."""
        if self._goal is None or not self._goal.asked:
            return
        self._goal = self._shared_among = None
        wave = self._runner.wave
        if wave is not None and wave.phase == "loading" and not wave.urgent:
            self._runner.end()

    # -------------------------------------------------------------- decisions

    def due(self, now: float) -> list[RolloutEffect]:
        """Everything that must be done now; call it after each event and each tick."""
        if self._again:
            self._again = False
            self._settles_at = now + SETTLE_S
        if self._adopted and self.committed is not None:
            self._adopted, self._unfinished = False, _is_ragged(self._held)
            self._settles_at, self._absent_at = now + SETTLE_S, now + ABSENT_S
            self._found_epoch = self.committed.epoch
            self._runner.effects.append(Commit(self.committed))
        if self._absent_at and now >= self._absent_at:
            self._absent_at = 0.0
            self._held.absent()
        if not self._is_listening(now):
            while self._advance(now):
                pass
            self._runner.send(now)
        effects, self._runner.effects = self._runner.effects, []
        return effects

    def _is_listening(self, now: float) -> bool:
        """Whether a member may know a newer placement, or a router use one that is older than the
        placement found in force: its slots are not to be freed yet.
        """
        if now >= self._settles_at and (
            now >= self._settles_at + self._rules.phase_timeout_s
            or not self._runner.late(self._found_epoch)
        ):
            self._found_epoch = 0
        return now < self._settles_at or self._found_epoch > 0

    def _advance(self, now: float) -> bool:
        """Take one step; False when something must happen first."""
        if self.committed is None:
            return self._urgent.place_first(now)
        self._doubt()
        kept = self._held.kept()
        if kept != self._held.promised:
            if not self._runner.lacks(kept):
                # Others hold what is gone: nothing that is under way waits.
                self._runner.commit(kept)
                return True
            if self._goal is not None:
                self._cancel("some experts are served by nobody and come first")
            return self._urgent.mend(kept, now)
        self._urgent.mended()
        wave = self._runner.wave
        if wave is None:
            return self._held.steady() and self._set_out(now)
        if wave.phase != "loading":
            return self._runner.settle(wave, now)
        return self._urgent.load(wave, now) if wave.urgent else self._load(wave, now)

    def _doubt(self) -> None:
        """Give up silent ranks that hold what no other does, if there are others."""
        silent = self._held.silent()
        kept = self._held.kept()
        doubted = silent & kept.keys()
        if not doubted or self._held.staying() <= silent:
            return
        others = {rank: slots for rank, slots in kept.items() if rank not in silent}
        if self._runner.unplaced(others) != self._runner.unplaced(kept):
            self._held.give_up(doubted)
            self._runner.note("ranks.doubted", ranks=sorted(doubted, key=rank_key))

    def _set_out(self, now: float) -> bool:
        """All is as promised: begin the next wave."""
        self._consider_shares()
        goal, runner = self._goal, self._runner
        if goal is None:
            return False
        kept = self._held.kept()
        room = self._room(goal.wants)
        layout = runner.padded(room)
        try:
            step = next_step(layout, goal.wants, self._rules.move_slots, skip=goal.postponed)
        except StuckError as error:
            self._give_up(str(error), ())
            return True
        if step is not None and step.loads:
            runner.begin(goal.wants, step.loads, room, now)
            return True
        if step is None:
            result = trimmed(kept, {rank: self._enough(rank) for rank in kept})
            if result == kept:
                self._reached(goal)
                return True
        elif step.layout == layout:
            if now < goal.retry_at:
                return False
            goal.postponed.clear()
            return True
        else:
            result = {rank: resized(step.layout[rank], num_slots(kept, rank)) for rank in kept}
        runner.finish(runner.begin(goal.wants, (), {}, now), result, 0, now)
        return True

    def _load(self, wave: Wave, now: float) -> bool:
        """Commit what was loaded once that is known of every load, or its time is over."""
        runner = self._runner
        pending = [
            load
            for load in wave.loads
            if not (runner.is_loaded(load) and self._held.ranks[load.rank].ready)
        ]
        late = {load.rank for load in pending if not runner.failed(load)}
        if late and now < wave.deadline:
            return False
        loaded = [load for load in wave.loads if load not in set(pending)]
        if pending:
            timeout_s = self._rules.phase_timeout_s
            words = [f"{rank} did not load its experts in {timeout_s:g} s" for rank in sorted(late)]
            self.faults.extendleft(words)
            for rank in {load.rank for load in pending} - late:
                words += _faults_of(rank, self._held.ranks[rank])
            self._set_back(pending, tuple(words), now)
        layout = runner.outcome(wave, loaded)
        if layout == self._held.kept():
            runner.end()
        else:
            runner.finish(wave, layout, len(loaded), now)
        return True

    # -------------------------------------------------------------- goals

    def _consider_shares(self) -> None:
        """After joins and drains each rank gets its share, whatever else was wanted."""
        if not self._shares_are_due():
            return
        staying, there = self._held.staying(), self._held.promised.keys()
        leaving = ", ".join(sorted(there - staying, key=rank_key))
        self._shared_among, self._unfinished = staying, False
        num_experts = self.shape.num_experts
        room = {rank: min(num_experts, self._most(rank)) for rank in staying}
        try:
            wants = shared(self._held.kept(), room, num_experts, self._rules.redundant_slots)
        except PlanError as error:
            self._runner.alarms["drain"] = f"{leaving} cannot drain: {error}"
            return
        self._cancel("ranks have joined or are to leave")
        self._set_goal(wants, "drain" if leaving else "join", asked=False)

    def _shares_are_due(self) -> bool:
        staying, there = self._held.staying(), self._held.promised.keys()
        return self._shared_among != staying and (self._unfinished or staying != there)

    def _set_goal(self, wants: Wants, why: str, *, asked: bool) -> None:
        self._goal = _Goal(wants, why, asked, missing(self._held.kept(), wants))
        self._shared_among, self._unfinished = self._held.staying(), False
        for kind in ("target", "drain"):
            self._runner.alarms.pop(kind, None)

    def _reached(self, goal: _Goal) -> None:
        self._goal = None
        if goal.asked:
            self._runner.effects.append(Done(goal.why))
        else:
            self._runner.note("shares.done", why=goal.why, moved=goal.to_move)

    def _cancel(self, reason: str) -> None:
        """Something more important came: whoever asked may ask anew, shares are made anew."""
        if (goal := self._goal) is None:
            return
        self._goal = self._shared_among = None
        if goal.asked:
            self._runner.effects.append(Failed(reason, (), None))
        else:
            self._unfinished = True

    def _set_back(self, loads: Sequence[Load], words: tuple[str, ...], now: float) -> None:
        goal = self._goal
        if goal is None:
            return
        keys = {(load.layer, load.rank, load.expert) for load in loads}
        goal.tries.update(keys)
        goal.postponed |= keys
        tries = max(goal.tries[key] for key in keys)
        reason = f"{len(loads)} experts could not be loaded"
        if tries >= MAX_TRIES:
            self._give_up(f"{reason}, after {tries} tries", words)
            return
        pause_s = min(RETRY_S * 2 ** (tries - 1), RETRY_MAX_S)
        goal.retry_at = max(goal.retry_at, now + pause_s)
        self._report(goal, reason, words, pause_s)

    def _give_up(self, reason: str, words: tuple[str, ...]) -> None:
        goal, self._goal = self._goal, None
        assert goal is not None
        if goal.asked:
            self._shared_among = None  # ranks that joined or drain were to be served by it too
        self._report(goal, reason, words, None)
        self._runner.alarms["target"] = f"gave up moving experts ({goal.why}): {reason}"

    def _report(
        self, goal: _Goal, reason: str, words: tuple[str, ...], retry_in_s: float | None
    ) -> None:
        if goal.asked:
            self._runner.effects.append(Failed(reason, words, retry_in_s))
        else:
            self._runner.note("shares.failed", reason=reason, faults=words, retry_in_s=retry_in_s)

    # -------------------------------------------------------------- slots

    def _most(self, rank: str) -> int:
        return self._held.most(rank, self.shape.num_experts)

    def _enough(self, rank: str) -> int:
        """Slots that the rank needs for what it serves, and the spare ones."""
        serving = most_filled(self._held.promised[rank])
        return with_spare(serving, self._rules.spare_slots, self._most(rank))

    def _room(self, wants: Wants) -> dict[str, int]:
        """Slots per layer that each rank may use on the way to ``wants``: at least one more than
        it is to hold in the end, if it offers that.
        """
        kept = self._held.kept()
        room = {}
        for rank, layers in wants.items():
            room[rank] = num_slots(kept, rank)
            if missing(kept, {rank: layers}):
                spare = max(1, self._rules.spare_slots)
                needed = with_spare(max(map(len, layers)), spare, self._most(rank))
                room[rank] = max(room[rank], needed)
        return room

    # -------------------------------------------------------------- questions

    @property
    def committed(self) -> Placement | None:
        """The placement in force."""
        return self._held.committed

    @property
    def proposed(self) -> Placement | None:
        """What the wave that is loading leads to."""
        return self._runner.proposed()

    @property
    def problem(self) -> str:
        """What keeps experts from being placed, in words; empty when nothing does."""
        return self._urgent.problem

    @property
    def phase(self) -> Phase:
        """Of the wave under way."""
        wave = self._runner.wave
        return "" if wave is None else wave.phase

    @property
    def why(self) -> str:
        """Why experts are being moved, or are about to be; empty when they are not. ``settling``:
        a move that is over, but for slots to be freed.
        """
        wave = self._runner.wave
        if self.committed is None:
            return "first"
        if self._held.kept() != self._held.promised or (wave and wave.loading_urgently):
            return "repair"
        if self._goal is not None:
            return self._goal.why
        if self._shares_are_due():
            return "drain" if self._held.promised.keys() - self._held.staying() else "join"
        return "" if self.idle() else "settling"

    @property
    def to_move(self) -> int:
        """Loads of the repair, first placement or target under way."""
        wave = self._runner.wave
        if wave is not None and wave.urgent:
            return len(wave.loads)
        return 0 if self._goal is None else self._goal.to_move

    @property
    def moved(self) -> int:
        """Those of them that are done."""
        wave, goal = self._runner.wave, self._goal
        if wave is not None and wave.urgent:
            return sum(map(self._runner.is_loaded, wave.loads))
        if goal is None:
            return 0
        return max(0, goal.to_move - missing(self._held.kept(), goal.wants))

    @property
    def alarms(self) -> tuple[str, ...]:
        """What an operator should look at, in words."""
        useless = self.useless_slots
        return (*self._runner.alarms.values(), *([useless] if useless else ()))

    @property
    def useless_slots(self) -> str:
        """Which redundant slots are left out however the experts are placed, in words and numbers;
        empty when there are none. As many workers are counted as are there or are waited for.
        """
        redundant, experts = self._rules.redundant_slots, self.shape.num_experts
        workers = max(self._rules.wanted_ranks, len(self._held.staying()))
        most = experts * (workers - 1)
        if redundant <= most:
            return ""
        return (
            f"planner.redundant_slots = {redundant}: {most} are used, since a worker holds an "
            f"expert once: {workers} workers x {experts} experts - {experts}"
        )

    def errors(self) -> dict[str, str]:
        """Rank -> why it could not take its slots."""
        return {rank: state.error for rank, state in self._held.ranks.items() if state.error}

    def retry_in_s(self, now: float) -> float:
        """When loads that failed are tried again; 0: none wait."""
        wave, goal = self._runner.wave, self._goal
        if wave is not None and wave.retry_at is not None:
            return max(0.0, wave.retry_at - now)
        return max(0.0, goal.retry_at - now) if goal is not None and goal.postponed else 0.0

    def idle(self) -> bool:
        """Everything is as promised, nothing is under way or waits to be tried again."""
        return (
            self.committed is not None
            and self._runner.wave is None
            and self._goal is None
            and not self._adopted
            and self._held.steady()
        )

    def serving_slots(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Live ranks that are to stay, and the serving slots each should have; none when they
        cannot hold the model.
        """
        ranks = tuple(sorted(self._held.staying(), key=rank_key))
        offered = [self._held.ranks[rank].offered for rank in ranks]
        try:
            shares = slots_per_rank(self.shape.num_experts, self._rules.redundant_slots, offered)
        except PlanError:
            return (), ()
        return ranks, shares

    def check(self) -> None:
        """Assert what must hold after each event."""
        self._held.check()
        self._runner.check()
        if self.committed is not None:
            assert fits(self.committed, self.shape)
            assert self.committed.epoch <= self._runner.newest_epoch


def _faults_of(rank: str, state: RankState) -> list[str]:
    return [f"{rank}: {reason}" for reason in state.faults]


def _is_ragged(held: Holdings) -> bool:
    """Whether some rank serves more experts in one layer than in another: a move was cut short."""
    return any(len({row.count(EMPTY) for row in slots}) > 1 for slots in held.promised.values())
