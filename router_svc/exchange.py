"""What the compute thread exchanges with others: commands in, results and state out."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mesh.messages import Delta, Load, Logprob, Rejected, Submit
from router_svc.scheduler import Outcome


class EngineBusyError(Exception):
    """The command queue is full: the compute thread does not keep up. Nothing was queued."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine was doing after its last step; replaced as a whole, read by any thread."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    lane_slots_in_use: int = 0
    epoch: int = 0
    unserved: str = "no placement has come from the planner"
    """Why it cannot run a token now, or empty."""
    lanes: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def load(self) -> Load:
        return Load(
            step=self.step,
            running=self.running,
            waiting=self.waiting,
            kv_blocks_total=self.kv_blocks_total,
            kv_blocks_free=self.kv_blocks_free,
            lane_slots_in_use=self.lane_slots_in_use,
            epoch=self.epoch,
        )


@dataclass(slots=True)
class Results:
    """What the engine has to say to gateways."""

    step: int
    """The engine's step when it was handed over."""
    deltas: dict[bytes, list[Delta]] = field(default_factory=dict)
    """Gateway -> what it gets."""
    rejected: list[tuple[bytes, Rejected]] = field(default_factory=list)

    def add(self, owner: bytes, delta: Delta) -> None:
        self.deltas.setdefault(owner, []).append(delta)


def delta_of(done: Outcome, logprob: Logprob | None) -> Delta:
    """What the gateway is told of a sequence's step. Its first delta is marked as such in the
    sequence.
    """
    sequence = done.sequence
    is_first, sequence.started = not sequence.started, True
    return Delta(
        request=sequence.request,
        tokens=() if done.token is None else (done.token,),
        logprobs=() if logprob is None or done.token is None else (logprob,),
        prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
        finish=done.finish,
        stop_token=done.stop_token,
        cached_tokens=sequence.cached_tokens if is_first else 0,
    )


@dataclass(frozen=True, slots=True)
class Submission:
    owner: bytes
    submit: Submit
    deadline: float


@dataclass(frozen=True, slots=True)
class Cancellation:
    requests: tuple[str, ...]
    owner: bytes | None = None
    """Instead of requests: everything of this gateway."""
