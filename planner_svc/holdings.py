"""What the ranks are promised to hold, what they were told to, and what is left of it. Pure.

The committed placement is a promise to routers. It stands while its ranks live and do not say that
they lack something; a rank that has not said anything yet (it just came back, or the planner did)
is given the benefit of the doubt, as routers do not use it before it says that it serves.
"""

from __future__ import annotations

from collections.abc import Collection

from mesh.messages import AssignSlots, Placement, SlotsReady, Source
from mesh.placement import EMPTY
from planner_svc.policies.uniform import UNLIMITED
from planner_svc.rank_state import RESEND_S, RankState
from planner_svc.waves import Layout, Slots, layout_of


class Holdings:
    """``first_command``: commands are numbered from there."""

    def __init__(self, moe_layers: tuple[int, ...], first_command: int) -> None:
        self.ranks: dict[str, RankState] = {}
        """Live expert workers."""
        self.committed: Placement | None = None
        self.promised: dict[str, Slots] = {}
        """What each rank of the committed placement holds by it."""
        self.lost: set[str] = set()
        """Ranks of the committed placement whose experts there are gone for good, or seem to be."""
        self.doubted: set[str] = set()
        """Those of them that are silent: what they hold may be there."""
        self._moe_layers = moe_layers
        self._commands = first_command
        self._kept: dict[str, Slots] | None = None

    # -------------------------------------------------------------- events

    def joined(self, rank: str, offered: int, bundles: str, *, restore: bool) -> None:
        """A new process; ``restore``: it is to take the slots again that its forerunner had."""
        self.ranks[rank] = RankState(self._moe_layers, offered, bundles)
        if self._too_small(rank):
            self.lost.add(rank)
        elif restore:
            self.lost.discard(rank)
        self._kept = None

    def gone(self, rank: str) -> bool:
        """Its process has ended; False if there was none."""
        if self.ranks.pop(rank, None) is None:
            return False
        self.doubted.discard(rank)
        self.lost |= {rank} & self.promised.keys()
        self._kept = None
        return True

    def heard(self, rank: str) -> bool:
        """A silent rank speaks again. Whether it was doubted: what it holds is there after all."""
        self.ranks[rank].silent = False
        if rank not in self.doubted:
            return False
        self.doubted.discard(rank)
        self.lost.discard(rank)
        self._kept = None
        return True

    def give_up(self, ranks: Collection[str]) -> None:
        """Silent ``ranks`` count as dead until they are heard: others are to hold what they do."""
        self.doubted |= set(ranks) & (self.promised.keys() - self.lost)
        self.lost |= self.doubted
        self._kept = None

    def absent(self) -> None:
        """Ranks of the committed placement that have not come are gone."""
        self.lost |= self.promised.keys() - self.ranks.keys()
        self._kept = None

    def answered(self, ready: SlotsReady, now: float) -> bool:
        """False for an acknowledgement that tells nothing new."""
        state = self.ranks.get(ready.id)
        self._kept = None
        return state is not None and state.answer(ready, now)

    def commit(self, placement: Placement, lost: Collection[str] = ()) -> None:
        """``placement`` is in force, though nothing of it is left on the ``lost`` ranks."""
        self.committed = placement
        self.promised = layout_of(placement)
        self.lost = set(lost) & self.promised.keys()
        self.doubted &= self.lost
        self._kept = None

    def learn(self, placement: Placement) -> None:
        """``placement`` was in force when this planner came."""
        self.commit(placement)
        self.lost = set(filter(self._too_small, self.ranks))

    def tell(
        self,
        rank: str,
        slots: Slots,
        now: float,
        *,
        epoch: int,
        bytes_per_s: int,
        lent: dict[str, int],
    ) -> tuple[AssignSlots, bool] | None:
        """The command that the rank must be sent now to hold ``slots``, and whether it was sent
        before; None when none is due. ``lent`` counts what each peer gives, so that it spreads.
        """
        state = self.ranks[rank]
        again = state.told(slots)
        if not again:
            self._commands += 1
            command = AssignSlots(
                command=self._commands,
                epoch=epoch,
                moe_layers=self._moe_layers,
                slots=slots,
                sources=self._sources(rank, slots, lent),
                bytes_per_s=bytes_per_s,
            )
            state.tell(command, now)
            self._kept = None
        if state.acknowledged or now < state.due_at or state.command is None:
            return None
        state.due_at = now + RESEND_S
        return state.command, again

    # -------------------------------------------------------------- questions

    def kept(self) -> dict[str, Slots]:
        """What of the committed placement stands: its live ranks, without slots that they lack."""
        if self._kept is None:
            self._kept = {
                rank: self._standing(rank, slots)
                for rank, slots in self.promised.items()
                if rank not in self.lost
            }
        return self._kept

    def sure(self) -> dict[str, Slots]:
        """What live ranks are known to hold."""
        return {rank: state.sure for rank, state in self.ranks.items()}

    def most(self, rank: str, num_experts: int) -> int:
        """Most slots per layer that a live rank may be told to hold."""
        offered = self.ranks[rank].offered
        return 2 * num_experts if offered == UNLIMITED else offered

    def silent(self) -> frozenset[str]:
        """Ranks of which nothing has been heard for a while."""
        return frozenset(rank for rank, state in self.ranks.items() if state.silent)

    def staying(self) -> frozenset[str]:
        """Live ranks that do not drain; a silent one only while something is promised of it."""
        return frozenset(
            rank
            for rank, state in self.ranks.items()
            if not state.draining and (not state.silent or rank in self.promised)
        )

    def steady(self) -> bool:
        """Everything that is promised is there, and nothing else but on ranks without a promise."""
        return self.kept() == self.promised and all(
            (state := self.ranks.get(rank)) is not None
            and state.told(slots)
            and state.does_as_told()
            for rank, slots in self.promised.items()
        )

    def check(self) -> None:
        """Assert what must hold after each event."""
        assert self.doubted <= self.lost <= self.promised.keys()
        assert self.doubted <= self.silent()
        for rank, state in self.ranks.items():
            assert not (state.acknowledged and (state.error or state.command is None))
            if state.command is not None:
                assert all(
                    held in (EMPTY, wanted)
                    for was, row in zip(state.sure, state.command.slots, strict=True)
                    for held, wanted in zip(was, row, strict=True)
                ), f"{rank} is believed to hold what it was told to give up"

    # -------------------------------------------------------------- inside

    def _too_small(self, rank: str) -> bool:
        """Whether a live rank offers fewer slots than it is promised to have."""
        slots, offered = self.promised.get(rank), self.ranks[rank].offered
        return slots is not None and offered != UNLIMITED and len(slots[0]) > offered

    def _standing(self, rank: str, slots: Slots) -> Slots:
        state = self.ranks.get(rank)
        if state is None or not state.answered:
            return slots
        lacking = set(state.lacking(slots))
        if not lacking:
            return slots
        return tuple(
            tuple(
                EMPTY if (layer, slot, expert) in lacking else expert
                for slot, expert in enumerate(row)
            )
            for layer, row in enumerate(slots)
        )

    def _sources(self, rank: str, slots: Slots, lent: dict[str, int]) -> tuple[Source, ...]:
        """A peer for each expert that the rank lacks and another serves and is known to hold."""
        serving = {
            peer: (self.ranks[peer], rows)
            for peer, rows in self.kept().items()
            if peer != rank and peer in self.ranks and self.ranks[peer].bundles
        }
        sources = []
        for layer, slot, expert in self.ranks[rank].lacking(slots):
            peers = [
                (lent.get(peer, 0), peer, rows[layer].index(expert), state)
                for peer, (state, rows) in serving.items()
                if expert in rows[layer] and state.holds(layer, rows[layer].index(expert), expert)
            ]
            if not peers:
                continue
            _, peer, peer_slot, state = min(peers, key=lambda known: known[:2])
            lent[peer] = lent.get(peer, 0) + 1
            sources.append(
                Source(
                    layer=self._moe_layers[layer],
                    slot=slot,
                    peer=peer,
                    address=state.bundles,
                    peer_slot=peer_slot,
                )
            )
        return tuple(sources)


def unplaced(layout: Layout, num_layers: int, num_experts: int) -> tuple[frozenset[int], ...]:
    """``[moe layers]`` experts that no rank of ``layout`` holds."""
    everyone = frozenset(range(num_experts))
    return tuple(
        everyone.difference(*(slots[layer] for slots in layout.values()))
        for layer in range(num_layers)
    )
