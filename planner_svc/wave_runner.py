"""One wave through its phases: what ranks are told meanwhile, and what is committed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mesh.messages import Placement
from mesh.placement import EMPTY
from planner_svc.holdings import Holdings, unplaced
from planner_svc.moves import Assign, Commit, ModelShape, Moved, Noted, RolloutEffect, RolloutRules
from planner_svc.waves import (
    Layout,
    Load,
    Slots,
    Wants,
    after,
    placement_of,
    resized,
    with_loads,
)

Phase = Literal["", "loading", "committing", "draining"]


@dataclass(slots=True)
class Wave:
    """Loads that are committed together."""

    wants: Wants
    """What ranks are to hold in the end: a copy elsewhere may be given up."""
    loads: tuple[Load, ...]
    room: Mapping[str, int]
    """Rank -> slots per layer that it needs for its loads."""
    urgent: bool
    """Experts wait that nobody serves: there is nothing to go back to."""
    epoch: int
    """Of the placement that it leads to."""
    deadline: float
    phase: Phase = "loading"
    union: dict[str, Slots] = field(default_factory=dict)
    """After the commit: what ranks hold until routers have switched, if more than they must."""
    tries: int = 0
    retry_at: float | None = None
    """Urgent: when loads that failed are tried again."""
    lent: dict[str, int] = field(default_factory=dict)
    """Rank -> experts that others fetch from it."""

    @property
    def loading_urgently(self) -> bool:
        return self.urgent and self.phase == "loading"


class WaveRunner:
    """Owns the wave under way, if any, and the way to a commit. ``newest_epoch``: the highest that
    anyone has seen.
    """

    def __init__(
        self, shape: ModelShape, rules: RolloutRules, held: Holdings, newest_epoch: int
    ) -> None:
        self.wave: Wave | None = None
        self.newest_epoch = newest_epoch
        self.routers: dict[str, int] = {}
        """Router -> epoch of the placement that it uses."""
        self.effects: list[RolloutEffect] = []
        """What is to be done, oldest first."""
        self.alarms: dict[str, str] = {}
        """Kind -> what an operator should look at. Kind ``phase`` lasts as long as the phase."""
        self._shape = shape
        self._rules = rules
        self._held = held

    # -------------------------------------------------------------- beginning and end

    def begin(
        self,
        wants: Wants,
        loads: Sequence[Load],
        room: Mapping[str, int],
        now: float,
        *,
        urgent: bool = False,
    ) -> Wave:
        """Have ``loads`` loaded; ``room``: rank -> slots per layer that they need."""
        self.newest_epoch += 1
        deadline = now + self._rules.phase_timeout_s
        needed = {load.rank: room[load.rank] for load in loads}
        self.wave = Wave(wants, tuple(loads), needed, urgent, self.newest_epoch, deadline)
        return self.wave

    def finish(self, wave: Wave, layout: Layout, loaded: int, now: float) -> None:
        """Commit ``layout``, to which ``loaded`` loads led; old copies serve until routers have
        switched.
        """
        before = {rank: self.aim(rank) for rank in self._held.ranks}
        self.commit(layout, wave.epoch)
        wave.union = {rank: slots for rank, slots in before.items() if slots != self._kept_by(rank)}
        assert self._held.committed is not None
        wave.epoch = self._held.committed.epoch
        self._enter(wave, "committing", now)
        if loaded:
            self.effects.append(Moved(loaded))

    def commit(self, layout: Layout, epoch: int = 0) -> None:
        """Put ``layout`` in force, with ``epoch`` unless a higher one has been seen. Lost ranks
        stay named while they alone held an expert.
        """
        lost: set[str] = set()
        if self.lacks(layout):
            lost = self._held.lost - layout.keys()
            layout = {rank: self._held.promised[rank] for rank in lost} | dict(layout)
        if epoch < self.newest_epoch or not epoch:
            self.newest_epoch += 1
            epoch = self.newest_epoch
        placement = self._placement(layout, epoch)
        self._held.commit(placement, lost)
        self.effects.append(Commit(placement))

    def end(self) -> None:
        """There is no wave any more; what it loaded and did not commit is given up."""
        self.wave = None
        self.alarms.pop("phase", None)

    def dropped(self, rank: str) -> None:
        """The rank is gone."""
        if (wave := self.wave) is not None:
            wave.loads = tuple(load for load in wave.loads if load.rank != rank)
            wave.union.pop(rank, None)

    # -------------------------------------------------------------- after the commit

    def settle(self, wave: Wave, now: float) -> bool:
        """Go on from the commit if routers and ranks are as far; False while they are not."""
        if wave.phase == "committing":
            if late := self.late(wave.epoch):
                self._alarm(wave, late, f"did not take over placement {wave.epoch}", now)
                return False
            self._enter(wave, "draining", now)
            return True
        slow = [
            rank
            for rank in wave.union
            if (state := self._held.ranks.get(rank)) is not None
            and not (state.silent or (state.told(self._kept_by(rank)) and state.acknowledged))
        ]
        if slow:
            self._alarm(wave, slow, "did not give up old slots", now)
            return False
        self.end()
        return True

    def _enter(self, wave: Wave, phase: Phase, now: float) -> None:
        self.wave = wave
        wave.phase, wave.deadline = phase, now + self._rules.phase_timeout_s
        self.alarms.pop("phase", None)

    def _alarm(self, wave: Wave, names: Iterable[str], what: str, now: float) -> None:
        if now >= wave.deadline:
            timeout_s = self._rules.phase_timeout_s
            self.alarms["phase"] = f"{', '.join(sorted(names))} {what} in {timeout_s:g} s"

    # -------------------------------------------------------------- what ranks are told

    def send(self, now: float) -> None:
        """Command each rank to hold what it is to hold now, until it says that it does. A silent
        one is told when it speaks again, as it then may have to give up nothing.
        """
        wave, committed = self.wave, self._held.committed
        loading: set[str] = set()
        if wave is not None and wave.phase == "loading":
            loading = {load.rank for load in wave.loads}
        elif committed is None:
            return
        bytes_per_s = 0
        if wave is not None and not wave.urgent and loading and self._rules.move_bytes_per_s:
            bytes_per_s = max(1, self._rules.move_bytes_per_s // len(loading))
        epoch = wave.epoch if wave is not None else 0
        for rank, state in self._held.ranks.items():
            if state.silent:
                continue
            told = self._held.tell(
                rank,
                self.aim(rank),
                now,
                epoch=epoch if rank in loading or committed is None else committed.epoch,
                bytes_per_s=bytes_per_s if rank in loading else 0,
                lent={} if wave is None else wave.lent,
            )
            if told is not None:
                self.effects.append(Assign(rank, *told))

    def aim(self, rank: str) -> Slots:
        """What the rank is to hold now."""
        kept, wave = self._kept_by(rank), self.wave
        if rank in self._held.doubted:
            return self._held.promised[rank]
        if wave is None or wave.phase == "draining":
            return kept
        if wave.phase == "committing":
            return wave.union.get(rank, kept)
        loads = [load for load in wave.loads if load.rank == rank]
        if not loads:
            return kept
        return with_loads({rank: resized(kept, max(len(kept[0]), wave.room[rank]))}, loads)[rank]

    # -------------------------------------------------------------- questions

    def outcome(self, wave: Wave, loaded: Sequence[Load]) -> dict[str, Slots]:
        """What is in force once ``loaded`` are."""
        layout = self.padded({load.rank: wave.room[load.rank] for load in loaded})
        return after(layout, loaded, wave.wants, self.sure(layout))

    def padded(self, room: Mapping[str, int]) -> dict[str, Slots]:
        """What stands of the placement, with at least so many slots per layer."""
        return {
            rank: resized(slots := self._kept_by(rank), max(len(slots[0]), room.get(rank, 0)))
            for rank in self._held.kept().keys() | room.keys()
        }

    def sure(self, layout: Layout) -> dict[str, Slots]:
        """What the ranks of ``layout`` are known to hold, slot by slot as there."""
        return {
            rank: resized(self._held.ranks[rank].sure, len(slots[0]))
            for rank, slots in layout.items()
            if rank in self._held.ranks
        }

    def late(self, epoch: int) -> list[str]:
        """Routers that still use an older placement."""
        return [router for router, used in self.routers.items() if 0 < used < epoch]

    def unplaced(self, layout: Layout) -> tuple[frozenset[int], ...]:
        """``[moe layers]`` experts that are on no rank of ``layout``."""
        return unplaced(layout, len(self._shape.moe_layers), self._shape.num_experts)

    def lacks(self, layout: Layout) -> bool:
        """Whether some expert is on no rank of ``layout``."""
        return any(self.unplaced(layout))

    def is_loaded(self, load: Load) -> bool:
        """Whether the rank is known to hold it."""
        return self._held.ranks[load.rank].holds(load.layer, load.slot, load.expert)

    def failed(self, load: Load) -> bool:
        """Whether the rank says that it could not load it."""
        return self._held.ranks[load.rank].failed(load)

    def proposed(self) -> Placement | None:
        """What the wave that is loading leads to."""
        wave = self.wave
        if wave is None or wave.phase != "loading":
            return None
        return self._placement(self.outcome(wave, wave.loads), wave.epoch)

    def note(self, event: str, **values: Any) -> None:
        self.effects.append(Noted(event, values))

    def check(self) -> None:
        """Assert what must hold after each event."""
        for rank, state in self._held.ranks.items():
            if state.answered and state.command is not None:
                for told, kept in zip(state.command.slots, self._kept_by(rank), strict=True):
                    for at, expert in enumerate(kept):
                        assert expert == EMPTY or told[at : at + 1] == (expert,), (
                            f"{rank} was told to give up what it is promised to hold"
                        )
        if (wave := self.wave) is None:
            return
        assert wave.epoch <= self.newest_epoch
        taken = {(load.layer, load.rank, load.slot) for load in wave.loads}
        assert len(taken) == len(wave.loads), "one expert a slot"
        if wave.phase == "loading":
            for load in wave.loads:
                found = self._kept_by(load.rank)[load.layer][load.slot : load.slot + 1]
                # Once loaded, an expert that was promised just there is what stands of that.
                assert found in ((), (EMPTY,), (load.expert,)), "a load needs an empty slot"
            assert wave.urgent or len(wave.loads) <= self._rules.move_slots
        else:
            assert self._held.committed is not None
            assert wave.epoch <= self._held.committed.epoch

    def _kept_by(self, rank: str) -> Slots:
        kept = self._held.kept().get(rank)
        return kept if kept is not None else tuple(() for _ in self._shape.moe_layers)

    def _placement(self, layout: Layout, epoch: int) -> Placement:
        return placement_of(
            layout,
            epoch=epoch,
            moe_layers=self._shape.moe_layers,
            num_experts=self._shape.num_experts,
        )
