"""When to plan, and what becomes of a plan. Pure: time is an argument.

The coordinator asks ``Decider.wants`` after each event, hands the ``Question`` out to ``think``,
and brings the ``Thought`` back to ``Decider.hear``, which says whether the roll-out is to move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from mesh.messages import Mode, PinDetail, Placement, PlanDetail
from mesh.placement import local_slots
from planner_svc.balance import LoadWindow, Rows
from planner_svc.drains import DrainOrder
from planner_svc.moves import ModelShape, Target
from planner_svc.policies.problem import Problem, Topology
from planner_svc.prices import Prices
from planner_svc.worth import DecideRules, Question, Thought, Verdict, broken_pins, judge, priced

SOON_S = 3.0
"""Pause before a plan for ranks that have just changed, or a mode that has."""
_LONGEST_BACK_OFF_S = 600.0


@dataclass(frozen=True, slots=True)
class Scene:
    """Where things stand: the placement in force, and who may hold experts (``[ranks]``)."""

    placement: Placement
    ranks: tuple[str, ...]
    slots: tuple[int, ...]
    """Serving slots that each rank should have."""
    hosts: tuple[str, ...]
    speeds: tuple[float, ...]


class Orders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What administrators ordered at run time, as it outlives the planner's process."""

    mode: Mode | None = None
    """None: as configured."""
    pins: tuple[PinDetail, ...] = ()
    drains: tuple[DrainOrder, ...] = ()


class Decider:
    """Mode, pins and timetable of the planning, and the story of the latest plan."""

    def __init__(
        self,
        rules: DecideRules,
        shape: ModelShape,
        mode: Mode,
        prices: Prices,
        *,
        unix_s: float,
        orders: Orders,
    ) -> None:
        """``mode`` as configured; ``unix_s``: Unix time at second 0 of the clock that ``now`` is
        read from.
        """
        self.rules = rules
        self.mode: Mode = orders.mode or mode
        self.pins: dict[tuple[int, int], tuple[str, ...]] = {
            (shape.moe_layers.index(pin.layer), pin.expert): pin.ranks
            for pin in orders.pins
            if pin.layer in shape.moe_layers and 0 <= pin.expert < shape.num_experts
        }
        """(index of the MoE layer, expert) -> members that are to hold a copy."""
        self.plans: Counter[Verdict] = Counter()
        """How many plans came to each verdict."""
        self._shape = shape
        self._prices = prices
        self._unix_s = unix_s
        self._configured: Mode = mode
        self._latest = PlanDetail(mode=self.mode, policy=rules.policy, epoch=0)
        self._next_at = 0.0
        self._thinking = False
        self._asked = False
        self._force = False
        self._own = False
        """The latest plan is the policy's."""
        self._failures = 0
        self._quiet = False
        """That there is too little load was said already."""

    # -------------------------------------------------------------- events

    def soon(self, now: float) -> None:
        """Something changed that a plan depends on."""
        self._next_at = min(self._next_at, now + SOON_S)

    def set_mode(self, mode: Mode, now: float) -> None:
        self.mode = mode
        self.soon(now)

    def pin(self, layer: int, expert: int, ranks: tuple[str, ...], now: float) -> None:
        """Keep copies on ``ranks``; none: lift the pin. The caller has checked them."""
        if ranks:
            self.pins[layer, expert] = ranks
        else:
            self.pins.pop((layer, expert), None)
        self._quiet = False
        self.soon(now)

    def rebalance(self, *, force: bool) -> None:
        """An administrator wants a plan now."""
        self._asked = True
        self._force = self._force or force

    # -------------------------------------------------------------- decisions

    def wants(self, now: float) -> bool:
        """Whether a plan is due; cheap, as it is asked after each event."""
        due = self.mode != "off" and now >= self._next_at
        return not self._thinking and (self._asked or due)

    def ask(self, scene: Scene, window: LoadWindow, now: float) -> Question | str:
        """The question of the plan that is due; or why none is made now, in words (empty when that
        was said before).
        """
        self._next_at = now + self.rules.interval_s
        question = self._question(scene, window, now)
        tokens = window.seen(now)
        enough = tokens >= self.rules.min_window_tokens or self._asked
        if not enough and not broken_pins(question.problem):
            said, self._quiet = self._quiet, True
            reason = (
                f"{tokens} tokens in the window, fewer than planner.min_window_tokens = "
                f"{self.rules.min_window_tokens}"
            )
            if self._latest.verdict in {"", "skipped"}:
                self._latest = msgspec.structs.replace(
                    self._latest, verdict="skipped", reason=reason
                )
            return "" if said else reason
        self._quiet = False
        self._asked, self._thinking = False, True
        return question

    def hear(self, thought: Thought, scene: Scene | None, now: float) -> Target | None:
        """Judge a plan; what it returns is to be rolled out. ``scene``: where things stand now, or
        None when nothing may move.
        """
        self._thinking = False
        force, self._force = self._force, False
        question = thought.question
        if (
            scene is None
            or scene.placement.epoch != question.epoch
            or (scene.ranks, scene.slots) != (question.ranks, question.problem.topology.slots)
        ):
            self.soon(now)
            self._conclude(thought, "skipped", "the mesh changed while the plan was made", now)
            return None
        verdict, reason = judge(thought, self.mode, force=force)
        self._conclude(thought, verdict, reason, now)
        self._own = True
        self._failures = self._failures + 1 if verdict == "failed" else 0
        if self._failures:
            pause_s = self.rules.interval_s * 2 ** min(self._failures, 16)
            self._next_at = now + min(pause_s, max(_LONGEST_BACK_OFF_S, self.rules.interval_s))
        if verdict != "moving" or thought.rows is None:
            return None
        return Target(
            ranks=scene.ranks,
            slots_per_rank=scene.slots,
            rows=_tuples(thought.rows),
            why="rebalance",
        )

    def propose(self, target: Target, scene: Scene, window: LoadWindow, now: float) -> None:
        """An administrator's own placement is being rolled out: the latest plan from now on."""
        question = self._question(scene, window, now)
        slots_of = dict(zip(target.ranks, target.slots_per_rank, strict=True))
        slots = tuple(slots_of.get(rank, 0) for rank in scene.ranks)
        first = dict(zip(target.ranks, accumulate(target.slots_per_rank, initial=0), strict=False))
        order = [first[rank] + s for rank in scene.ranks for s in range(slots_of.get(rank, 0))]
        rows = np.array(target.rows, dtype=np.int64).reshape(len(target.rows), -1)[:, order]
        thought = priced(question, rows, slots, question.problem.window.sum(axis=0))
        self._conclude(thought, "moving", "asked for by an administrator", now, slots)
        self._own = False
        self._next_at = max(self._next_at, now + self.rules.interval_s)

    def finished(self) -> None:
        """The roll-out has reached its target."""
        if self._latest.verdict in {"moving", "failed"}:
            self._end("moved")

    def failed(self, reason: str, *, given_up: bool) -> None:
        """The roll-out failed; unless it was given up, it tries again by itself."""
        if self._latest.verdict == "moving":
            self._end("failed", f"{reason}; {self._latest.reason}")
        if given_up:
            self._own = False

    # -------------------------------------------------------------- questions

    def detail(self, live: Mapping[str, Any]) -> PlanDetail:
        """The latest plan; ``live``: the fields of ``PlanDetail`` that the roll-out knows."""
        pins = self.orders().pins
        return msgspec.structs.replace(self._latest, mode=self.mode, pins=pins, **live)

    def orders(self) -> Orders:
        """Which mode and pins administrators have ordered so far."""
        pins = tuple(
            PinDetail(layer=self._shape.moe_layers[layer], expert=expert, ranks=ranks)
            for (layer, expert), ranks in sorted(self.pins.items())
        )
        return Orders(mode=None if self.mode == self._configured else self.mode, pins=pins)

    @property
    def own_move(self) -> bool:
        """Whether a plan of the policy is being rolled out."""
        return self._own and self._latest.verdict in {"moving", "failed"}

    def numbers(self) -> dict[str, Any]:
        """What is logged about the latest plan."""
        names = (
            "reason", "moves", "gain_s", "cost_s", "balancedness_before", "balancedness_after",
        )  # fmt: skip
        values = {name: getattr(self._latest, name) for name in names}
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}

    @property
    def alarms(self) -> tuple[str, ...]:
        """What keeps plans from being made, in words."""
        return (f"no plan can be made: {self._latest.reason}",) if self._failures else ()

    @property
    def verdict(self) -> str:
        """Of the latest plan."""
        return self._latest.verdict

    # -------------------------------------------------------------- inside

    def _question(self, scene: Scene, window: LoadWindow, now: float) -> Question:
        return Question(
            problem=self._problem(scene, window, now),
            rules=self.rules,
            ranks=scene.ranks,
            epoch=scene.placement.epoch,
            span_s=window.covered_s(now),
            pair_s=self._prices.pair_s,
            slot_s=self._prices.slot_s,
        )

    def _problem(self, scene: Scene, window: LoadWindow, now: float) -> Problem:
        node_of = {host: node for node, host in enumerate(dict.fromkeys(scene.hosts))}
        rank_of = {name: rank for rank, name in enumerate(scene.ranks)}
        empty = tuple(() for _ in self._shape.moe_layers)
        held = [
            local_slots(scene.placement, rank) if rank in scene.placement.ranks else empty
            for rank in scene.ranks
        ]
        previous = [
            [expert for blocks in held for expert in blocks[layer]]
            for layer in range(len(self._shape.moe_layers))
        ]
        pins = {
            where: known
            for where, names in self.pins.items()
            if (known := tuple(rank_of[name] for name in names if name in rank_of))
        }
        return Problem(
            window=window.series(now),
            topology=Topology(
                slots=scene.slots,
                nodes=tuple(node_of[host] for host in scene.hosts),
                speeds=scene.speeds,
            ),
            previous=np.array(previous, dtype=np.int64).reshape(len(previous), -1),
            previous_slots=tuple(len(blocks[0]) for blocks in held),
            groups=self.rules.num_groups,
            group_rule=self.rules.group_rule(len(node_of)),
            pins=pins,
        )

    def _conclude(
        self,
        thought: Thought,
        verdict: Verdict,
        reason: str,
        now: float,
        slots: tuple[int, ...] | None = None,
    ) -> None:
        question = thought.question
        proposed = None
        if thought.rows is not None:
            proposed = Placement(
                epoch=0,
                moe_layers=self._shape.moe_layers,
                num_experts=self._shape.num_experts,
                ranks=question.ranks,
                slots_per_rank=question.problem.topology.slots if slots is None else slots,
                physical_to_logical=_tuples(thought.rows),
            )
        self._latest = PlanDetail(
            mode=self.mode,
            policy=self.rules.policy,
            epoch=0,
            planned_at=self._unix_s + now,
            balancedness_before=thought.before,
            balancedness_after=thought.after,
            moves=thought.moves,
            gain_s=thought.gain_s,
            cost_s=thought.cost_s,
            verdict=verdict,
            reason="; ".join((reason, *thought.notes)),
            proposed=proposed,
        )
        self.plans[verdict] += 1

    def _end(self, verdict: Verdict, reason: str = "") -> None:
        self._latest = msgspec.structs.replace(
            self._latest, verdict=verdict, reason=reason or self._latest.reason
        )
        self.plans[verdict] += 1


def _tuples(rows: Rows) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in rows.tolist())
