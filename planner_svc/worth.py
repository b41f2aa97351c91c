"""Whether a plan is worth its moves. Pure.

API
    ``think(policy, question) -> Thought``   makes a plan, checks it and prices it; takes
                                             milliseconds to seconds: call it off the event loop
    ``priced(question, ...) -> Thought``     prices a plan that someone else made
    ``judge(thought, mode, force=...)``      moving, advised or skipped, and why

A plan's gain is expert time: the sum over layers of how much earlier the fullest rank is done, at
the rate of pairs that was seen, for as long as the plan is expected to be of use. Its cost is the
time that its slots take to load. Both are priced as measured (``prices``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mesh.messages import Mode
from mesh.settings import Settings
from planner_svc.balance import Counts, Rows, Split, balancedness, rank_loads
from planner_svc.policies.checks import verify
from planner_svc.policies.problem import PlanError, Policy, Problem

Verdict = Literal["skipped", "advised", "moving", "moved", "failed"]
GroupRule = Literal["strict", "soft", "off"]


@dataclass(frozen=True, slots=True)
class DecideRules:
    """The knobs of ``planner`` that decide; see ``mesh.settings``."""

    policy: str
    interval_s: float
    min_window_tokens: int
    horizon_s: float
    min_gain: float
    groups: Literal["auto", "strict", "soft", "off"]
    num_groups: int
    """Expert groups that the model's gate limits tokens to."""
    split: Split
    """How the mesh's routers choose among copies."""

    @classmethod
    def of(cls, settings: Settings, num_groups: int) -> DecideRules:
        planner = settings.planner
        return cls(
            policy=planner.policy,
            interval_s=planner.interval_s,
            min_window_tokens=planner.min_window_tokens,
            horizon_s=planner.horizon_s,
            min_gain=planner.min_gain,
            groups=planner.groups,
            num_groups=num_groups,
            split="even" if settings.router.replica_choice == "even" else "level",
        )

    def group_rule(self, num_nodes: int) -> GroupRule:
        if self.groups == "auto":
            return "soft" if self.num_groups > 1 and num_nodes > 1 else "off"
        return self.groups


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is wanted for."""

    problem: Problem
    rules: DecideRules
    ranks: tuple[str, ...]
    epoch: int
    """Of the placement that is to be improved."""
    span_s: float
    """How long a time the loads come from."""
    pair_s: float
    slot_s: float


@dataclass(frozen=True, slots=True)
class Thought:
    """A plan and its price, or the ``error`` for which there is none."""

    question: Question
    rows: Rows | None = None
    """``[layers, slots]`` logical experts."""
    error: str = ""
    notes: tuple[str, ...] = ()
    must: str = ""
    """What is wrong with the placement in force, whatever a plan gains: pins that it ignores."""
    before: float = 1.0
    """Balancedness of the placement in force on the loads planned for."""
    after: float = 1.0
    moves: int = 0
    gain_s: float = 0.0
    saved: float = 0.0
    """The gain as a share of the expert time."""
    cost_s: float = 0.0


def think(policy: Policy, question: Question) -> Thought:
    """Plan, verify, and compare with the placement in force."""
    try:
        plan = policy.plan(question.problem)
        verify(plan, question.problem)
    except PlanError as error:
        return Thought(question, error=str(error))
    loads = _as_many(plan.expected, question.problem.window.sum(axis=0))
    return priced(question, plan.rows, question.problem.topology.slots, loads, plan.notes)


def priced(
    question: Question,
    rows: Rows,
    slots: tuple[int, ...],
    loads: Counts,
    notes: tuple[str, ...] = (),
) -> Thought:
    """Compare ``rows`` ``[layers, sum(slots)]`` with the placement in force, on ``loads``
    ``[layers, experts]`` of the window's length.
    """
    problem, rules = question.problem, question.rules
    speeds = problem.topology.speeds
    previous, previous_slots = _in_force(problem)
    before = rank_loads(previous, previous_slots, loads, speeds, rules.split)
    after = rank_loads(rows, slots, loads, speeds, rules.split)
    took = (before / speeds).max(axis=1, initial=0.0).sum()
    saved = took - (after / speeds).max(axis=1, initial=0.0).sum()
    wanted = _held(rows, slots, loads.shape[1])
    held = _held(previous, previous_slots, loads.shape[1])
    moves = len(np.setdiff1d(wanted, held, assume_unique=True))
    return Thought(
        question,
        rows=rows,
        notes=notes,
        must=broken_pins(problem),
        before=balancedness(before, speeds),
        after=balancedness(after, speeds),
        moves=moves,
        gain_s=float(saved) / question.span_s * question.pair_s * rules.horizon_s,
        saved=float(saved / took) if took > 0 else 0.0,
        cost_s=moves * question.slot_s,
    )


def judge(thought: Thought, mode: Mode, *, force: bool) -> tuple[Verdict, str]:
    """What becomes of a plan, and why, in words and numbers."""
    rules = thought.question.rules
    if thought.rows is None:
        return "failed", thought.error
    if mode == "off":
        return "skipped", "the mode is off"
    if not thought.moves:
        return "skipped", "the placement in force is what the policy wants"
    price = (
        f"gain {thought.gain_s:.3g} s in {rules.horizon_s:g} s ({thought.saved:.1%} of the expert "
        f"time), cost {thought.cost_s:.3g} s for {thought.moves} slots"
    )
    why = ""
    if thought.must:
        why = f"{thought.must}; {price}"
    elif force and mode == "auto":
        why = f"asked for whatever it costs; {price}"
    elif thought.gain_s <= thought.cost_s:
        return "skipped", f"not worth it: {price}"
    elif thought.saved < rules.min_gain:
        return "skipped", f"saves less than planner.min_gain = {rules.min_gain:.1%}: {price}"
    return ("moving" if mode == "auto" else "advised"), why or f"worth it: {price}"


def broken_pins(problem: Problem) -> str:
    """How many pinned copies the placement in force lacks, in words; empty when none."""
    previous, slots = _in_force(problem)
    num_ranks, num_experts = len(slots), problem.window.shape[2]
    keys = [
        (layer * num_ranks + rank) * num_experts + expert
        for (layer, expert), ranks in problem.pins.items()
        for rank in ranks
    ]
    held = _held(previous, slots, num_experts)
    broken = len(np.setdiff1d(np.array(keys, dtype=np.int64), held))
    return f"{broken} pinned copies are missing" if broken else ""


def _in_force(problem: Problem) -> tuple[Rows, tuple[int, ...]]:
    """The placement in force and its slots ``[ranks]``; there is one before anything is planned."""
    assert problem.previous is not None
    assert problem.previous_slots is not None
    return problem.previous, problem.previous_slots


def _held(rows: Rows, slots: tuple[int, ...], num_experts: int) -> Rows:
    """Sorted keys of all (layer, rank, expert) that are held."""
    layer, slot = np.nonzero(rows >= 0)
    rank = np.repeat(np.arange(len(slots)), slots)[slot]
    keys: Rows = np.unique((layer * len(slots) + rank) * num_experts + rows[layer, slot])
    return keys


def _as_many(expected: Counts, window: Counts) -> Counts:
    """``expected``, each layer scaled to as many tokens as the window had: a policy's forecast
    tells how they fall on the experts, the window how many there are.
    """
    wanted = window.sum(axis=1, keepdims=True)
    have = expected.sum(axis=1, keepdims=True)
    scaled: Counts = np.where(have > 0, expected * (wanted / np.where(have > 0, have, 1)), window)
    return scaled
