"""``python -m router_svc.follower ASSIGNMENT``: one more rank of a router's group.

It belongs to its leader, which starts it with an ``Assignment``, and to nobody else: it is no
member of the mesh, takes no signal but the last one, and ends with its leader. It sleeps until it
is asked something.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import structlog
import torch
from ep_kernels.crew import Crew
from structlog.typing import FilteringBoundLogger

from mesh import logs
from mesh.processes import die_with
from mesh.settings import LogSettings
from mesh.supervise import ExitCode
from moe_model.errors import CheckpointError
from moe_model.kv_cache import KVCache
from moe_model.model import Weights
from moe_model.plan import StepPlan
from moe_model.shard_model import RouterShard, load_shard
from router_svc.group_model import decode_chunks
from router_svc.peers import GroupLost, LeaderLink, Op, Question


class Assignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a follower is told when it is started."""

    router: str
    """Id of the router, for the log."""
    rank: int
    size: int
    leader_pid: int
    link_fd: int
    """The inherited end of its socket to the leader."""
    model: str
    """Path of the checkpoint."""
    weights: Weights
    exact: bool
    threads: int
    logs: LogSettings


class Follower:
    """Answers the leader's questions with ``model``'s parts."""

    def __init__(self, model: RouterShard, leader: LeaderLink, log: FilteringBoundLogger) -> None:
        self._model = model
        self._leader = leader
        self._log = log
        self._hidden = model.spec.hidden_size
        self._kv: KVCache | None = None
        self._plans: dict[int, StepPlan] = {}

    def serve(self) -> None:
        """Until the leader is gone: raises ``GroupLost`` then."""
        while True:
            question = self._leader.next()
            match question.op:
                case Op.CACHE:
                    self._kv = self._model.new_kv_cache(question.a, question.b)
                case Op.CLEAR:
                    self._cache.clear(question.payload.tolist())
                case Op.PLAN:
                    self._keep_plan(question)
                case _:
                    self._leader.answer(self._part(question))

    @property
    def _cache(self) -> KVCache:
        assert self._kv is not None, "asked before there was a cache"
        return self._kv

    def _keep_plan(self, question: Question) -> None:
        chunks = decode_chunks(question.payload.tolist(), question.a)
        self._plans.pop(question.b, None)
        try:
            self._plans[question.b] = self._model.plan(chunks, self._cache.block_size)
        except ValueError:
            # The leader cannot plan these chunks either, and will not ask for them.
            self._log.exception("plan.refused")

    def _part(self, question: Question) -> torch.Tensor:
        """NaN where it cannot be computed: that ends the sequences, and no others."""
        try:
            return self._compute(question).contiguous()
        except Exception:  # noqa: BLE001 - the boundary: the other sequences go on
            self._log.exception("part.failed", op=question.op.name, layer=question.a)
            return torch.full(self._shape(question), float("nan"))

    def _compute(self, question: Question) -> torch.Tensor:
        model, layer, rows = self._model, question.a, question.rows(self._hidden)
        match question.op:
            case Op.EMBED:
                return model.embed_part(self._plans[question.b].token_ids)
            case Op.ATTEND:
                return model.attend_part(layer, rows, self._plans[question.b], self._cache)
            case Op.DENSE:
                return model.dense_part(layer, rows)
            case Op.SHARED:
                return model.shared_part(layer, rows)
            case Op.LOGITS:
                return model.logits_part(rows)
        raise AssertionError(question.op)

    def _shape(self, question: Question) -> tuple[int, int]:
        if question.op is Op.EMBED:
            return self._plans[question.b].num_tokens, self._hidden
        rows = question.rows(self._hidden).shape[0]
        return rows, self._model.vocabulary_size if question.op is Op.LOGITS else self._hidden


def main(argument: str) -> ExitCode:
    """The process."""
    task = msgspec.json.decode(argument.encode(), type=Assignment)
    # The leader decides when the group ends, also where a signal goes to every process of it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with(task.leader_pid, signal.SIGKILL)
    logs.configure(task.logs, role="router", id=task.router, rank=str(task.rank))
    log: FilteringBoundLogger = structlog.get_logger("follower")
    log = log.bind(role="router", id=task.router, rank=task.rank)
    torch.set_num_threads(task.threads)
    Crew(task.threads - 1).share()
    try:
        leader = LeaderLink(socket.socket(fileno=task.link_fd))
        parts = load_shard(
            Path(task.model),
            task.rank,
            task.size,
            weights=task.weights,
            exact=task.exact,
            progress=lambda _share: leader.say_loading(),
        )
        leader.say_loaded()
        log.info("follower.loaded", pid=os.getpid())
        with torch.inference_mode():
            Follower(RouterShard(parts), leader, log).serve()
    except CheckpointError as error:
        log.error("follower.cannot_serve", reason=str(error))  # noqa: TRY400 - no bug
        return ExitCode.CANNOT_SERVE
    except GroupLost as error:
        log.info("follower.stopped", reason=str(error))
        return ExitCode.CRASHED
    except Exception:
        log.exception("follower.crashed")
        return ExitCode.CRASHED
    return ExitCode.OK


if __name__ == "__main__":
    code = main(sys.argv[1])
    raise SystemExit(code)
