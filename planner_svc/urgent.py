"""Experts that nobody serves: the first placement, and homes for what died with its ranks. Pure.

Nothing limits such a wave, and there is nothing to go back to: it ends when every expert has a
home. What fails is tried again after a pause, elsewhere if anyone else has room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mesh.messages import Placement
from mesh.placement import EMPTY
from planner_svc.holdings import Holdings
from planner_svc.moves import ModelShape, RolloutRules
from planner_svc.policies.problem import PlanError
from planner_svc.sharing import first, repaired
from planner_svc.wave_runner import Wave, WaveRunner
from planner_svc.waves import (
    Layout,
    Load,
    Slots,
    Wants,
    after,
    next_step,
    num_slots,
    rank_key,
    wants_of,
    with_spare,
)

RETRY_S = 1.0
"""Pause before loads that failed are tried again; it doubles with each failure."""
RETRY_MAX_S = 10.0
_NO_WORKERS = "no expert worker has joined"


@dataclass(slots=True)
class Urgent:
    """Drives the runner's wave while experts have no home. ``stored``: the plan of an earlier run,
    or None.
    """

    shape: ModelShape
    rules: RolloutRules
    held: Holdings
    runner: WaveRunner
    stored: Placement | None
    problem: str = _NO_WORKERS
    """What keeps experts from being placed, in words; empty when nothing does."""
    waiting_since: float | None = None
    """When the first of those came who wait for the others."""

    def place_first(self, now: float) -> bool:
        """Take a step towards the first placement; False when something must happen first."""
        if self.runner.wave is not None:
            return self.load(self.runner.wave, now)
        present = self.held.staying()
        if not present or self.waiting_since is None:
            self.problem = _NO_WORKERS
            return False
        wanted = self.rules.wanted_ranks
        if len(present) < wanted and now - self.waiting_since < self.rules.patience_s:
            self.problem = f"waiting for expert workers: {len(present)} of {wanted}"
            return False
        try:
            layout, unfit = first(
                self.shape,
                {rank: self._most(rank) for rank in present},
                self.rules.redundant_slots,
                self.rules.spare_slots,
                self.stored,
            )
        except PlanError as error:
            self.problem = str(error)
            return False
        if unfit:
            self.runner.note("plan.not_used", reason=unfit)
        self.problem, self.waiting_since = "", None
        loads = [
            Load(layer, rank, slot, expert)
            for rank, slots in layout.items()
            for layer, row in enumerate(slots)
            for slot, expert in enumerate(row)
            if expert not in {EMPTY, *row[:slot]}
        ]
        room = {rank: num_slots(layout, rank) for rank in layout}
        self.runner.begin(wants_of(layout), loads, room, now, urgent=True)
        return True

    def mend(self, kept: dict[str, Slots], now: float) -> bool:
        """Some experts of the committed placement have no home in ``kept``, which is what stands of
        it. Takes a step; False when something must happen first.
        """
        wave = self.runner.wave
        if wave is not None and not wave.loading_urgently:
            self.runner.end()
            wave = None
        if wave is not None:
            silent = self.held.silent()
            on_the_way = {(i.layer, i.expert) for i in wave.loads if i.rank not in silent}
            lost = self.runner.unplaced(kept)
            if all((at, expert) in on_the_way for at, row in enumerate(lost) for expert in row):
                return self.load(wave, now)
        return self._repair(kept, now, wave)

    def mended(self) -> None:
        """The committed placement stands as it is."""
        self.problem = ""
        self.runner.alarms.pop("repair", None)

    def load(self, wave: Wave, now: float) -> bool:
        """Commit when every expert has a home; see to loads that failed or take long."""
        runner = self.runner
        pending = [load for load in wave.loads if not runner.is_loaded(load)]
        failed = [load for load in pending if runner.failed(load)]
        if len(failed) == len(pending):
            loaded = [load for load in wave.loads if load not in set(failed)]
            layout = runner.outcome(wave, loaded)
            if not runner.lacks(layout):
                runner.alarms.pop("repair", None)
                runner.finish(wave, layout, len(loaded), now)
                return True
        if failed and wave.retry_at is None:
            wave.tries += 1
            pause_s = min(RETRY_S * 2 ** min(wave.tries - 1, 16), RETRY_MAX_S)
            wave.retry_at = now + pause_s
            names = ", ".join(sorted({load.rank for load in failed}, key=rank_key))
            runner.alarms["repair"] = f"{names} could not load {len(failed)} experts"
            runner.note("repair.failed", ranks=names, experts=len(failed), retry_in_s=pause_s)
        elif wave.retry_at is not None and now >= wave.retry_at:
            wave.retry_at = None
            if self.held.committed is not None:
                self._repair(self.held.kept(), now, wave)
            for rank in {load.rank for load in failed}:
                self.held.ranks[rank].forget_command()
            return True
        elif now >= wave.deadline:
            names = ", ".join(sorted({load.rank for load in pending}, key=rank_key))
            runner.alarms["phase"] = f"{names} still load experts that nobody serves"
        return False

    # -------------------------------------------------------------- inside

    def _repair(self, kept: dict[str, Slots], now: float, wave: Wave | None) -> bool:
        """Plan where lost experts go; loads of ``wave`` that have not failed stay as they are."""
        runner = self.runner
        loads = () if wave is None else wave.loads
        silent = self.held.silent()
        going_on = [i for i in loads if not (runner.failed(i) or i.rank in silent)]
        wants = self._homes(kept, {(load.layer, load.expert): load.rank for load in going_on})
        if wants is None:
            runner.end()
            return False
        given_up = after(kept, (), wants, runner.sure(kept))
        if given_up != kept:
            runner.commit(given_up)  # replicas whose slots are needed now
            return True
        room = {}
        for rank, layers in wants.items():
            needed, slots = max(map(len, layers)), num_slots(kept, rank)
            fits = needed <= slots
            room[rank] = (
                slots if fits else with_spare(needed, self.rules.spare_slots, self._most(rank))
            )
        step = next_step(
            runner.padded(room),
            wants,
            len(wants) * len(self.shape.moe_layers) * self.shape.num_experts,
            prefer={(load.layer, load.rank, load.expert): load.slot for load in going_on},
        )
        assert step is not None, "something is lost"
        new = runner.begin(wants, step.loads, room, now, urgent=True)
        if wave is not None:
            new.tries, new.deadline = wave.tries, wave.deadline
        names = sorted({load.rank for load in step.loads}, key=rank_key)
        runner.note("repair.began", experts=len(step.loads), ranks=names)
        return True

    def _homes(self, kept: Layout, already: Mapping[tuple[int, int], str]) -> Wants | None:
        """On ranks that are to stay, else on any; None when there is no room, and why in words."""
        message = ""
        silent = self.held.silent()
        for takers in (self.held.staying() - silent, self.held.ranks.keys() - silent):
            try:
                wants = repaired(
                    kept,
                    self.runner.sure(kept),
                    {rank: min(self.shape.num_experts, self._most(rank)) for rank in takers},
                    self.shape.num_experts,
                    len(self.shape.moe_layers),
                    last={rank: state.setbacks for rank, state in self.held.ranks.items()},
                    already=already,
                )
            except PlanError as error:
                message = str(error)
            else:
                self.mended()
                return wants
        names = ", ".join(sorted(self.held.lost, key=rank_key)) or "another expert worker"
        self.problem = f"{message}; waiting for {names}"
        self.runner.alarms["repair"] = self.problem
        return None

    def _most(self, rank: str) -> int:
        return self.held.most(rank, self.shape.num_experts)
