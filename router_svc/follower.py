"""``python -m router_svc.follower ASSIGNMENT``: one more rank of a router's group.

It belongs to its leader, which starts it with an ``Assignment``, and to nobody else: it is no
member of the mesh, takes no signal but the last one, and ends with its leader. It sleeps until it
is asked something. Rows and answers go over its link to the leader, or between devices by the
group's ranks (``device_group``).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import torch
from ep_kernels.crew import Crew
from ep_kernels.triton.device import DeviceUnavailable
from structlog.typing import FilteringBoundLogger

from mesh import logs
from mesh.processes import die_with
from mesh.settings import LogSettings
from mesh.supervise import ExitCode
from moe_model.architecture import ModelSpec
from moe_model.errors import CheckpointError
from moe_model.model import Weights
from moe_model.plan import Chunk
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
    device: str = "cpu"
    """This rank's, as ``router.device`` names one."""
    store_fd: int = -1
    """On a device: the inherited descriptor by which the ranks meet."""


class ShardModel(Protocol):
    """One rank's part: see ``RouterShard``. Plan and cache are the model's own kind."""

    spec: ModelSpec
    vocabulary_size: int

    def new_kv_cache(self, num_blocks: int, block_size: int) -> Any: ...

    def plan(self, chunks: Sequence[Chunk], block_size: int = 16) -> Any: ...

    def embed_part(self, token_ids: torch.Tensor) -> torch.Tensor: ...

    def attend_part(self, layer: int, h: torch.Tensor, plan: Any, kv: Any) -> torch.Tensor: ...

    def dense_part(self, layer: int, h: torch.Tensor) -> torch.Tensor: ...

    def shared_part(self, layer: int, x: torch.Tensor) -> torch.Tensor: ...

    def logits_part(self, h_rows: torch.Tensor) -> torch.Tensor: ...


class Exchange(Protocol):
    """How rows come from the leader and parts go back. Methods raise ``GroupLost``."""

    place: torch.device
    """Where they lie."""

    def meet(self) -> None:
        """``Op.MEET``."""

    def rows(self, question: Question) -> torch.Tensor:
        """``[n, hidden]`` fp32, valid until the next question; ``[0, hidden]`` if it has none."""

    def answer(self, question: Question, part: torch.Tensor) -> None:
        """``part``: fp32."""

    def cached(self) -> None:
        """The KV cache is there."""


class ByLink:
    """Everything over the link, as payloads and answers."""

    place = torch.device("cpu")

    def __init__(self, leader: LeaderLink, hidden: int) -> None:
        self._leader = leader
        self._hidden = hidden

    def meet(self) -> None:
        raise AssertionError("ranks meet on devices alone")

    def rows(self, question: Question) -> torch.Tensor:
        return question.rows(self._hidden)

    def answer(self, question: Question, part: torch.Tensor) -> None:
        del question
        self._leader.answer(part.contiguous())

    def cached(self) -> None:
        pass


class Follower:
    """Answers the leader's questions with ``model``'s parts."""

    def __init__(
        self, model: ShardModel, leader: LeaderLink, exchange: Exchange, log: FilteringBoundLogger
    ) -> None:
        self._model = model
        self._leader = leader
        self._exchange = exchange
        self._log = log
        self._hidden = model.spec.hidden_size
        self._kv: Any = None
        self._plans: dict[int, Any] = {}

    def serve(self) -> None:
        """Until the leader is gone: raises ``GroupLost`` then."""
        while True:
            question = self._leader.next()
            match question.op:
                case Op.CACHE:
                    self._kv = self._model.new_kv_cache(question.a, question.b)
                    self._exchange.cached()
                case Op.MEET:
                    self._exchange.meet()
                case Op.CLEAR:
                    self._cache.clear(question.payload.tolist())
                case Op.PLAN:
                    self._keep_plan(question)
                case _:
                    rows = self._exchange.rows(question)
                    self._exchange.answer(question, self._part(question, rows))

    @property
    def _cache(self) -> Any:
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

    def _part(self, question: Question, rows: torch.Tensor) -> torch.Tensor:
        """NaN where it cannot be computed: that ends the sequences, and no others."""
        try:
            return self._compute(question, rows)
        except Exception:  # noqa: BLE001 - the boundary: the other sequences go on
            self._log.exception("part.failed", op=question.op.name, layer=question.a)
            shape = self._shape(question, rows)
            return torch.full(shape, float("nan"), device=self._exchange.place)

    def _compute(self, question: Question, rows: torch.Tensor) -> torch.Tensor:
        model, layer = self._model, question.a
        match question.op:
            case Op.EMBED:
                plan = self._plans[question.b]
                return model.embed_part(plan.token_ids[: plan.num_tokens])
            case Op.ATTEND:
                return model.attend_part(layer, rows, self._plans[question.b], self._cache)
            case Op.DENSE:
                return model.dense_part(layer, rows)
            case Op.SHARED:
                return model.shared_part(layer, rows)
            case Op.LOGITS:
                return model.logits_part(rows)
        raise AssertionError(question.op)

    def _shape(self, question: Question, rows: torch.Tensor) -> tuple[int, int]:
        if question.op is Op.EMBED:
            return self._plans[question.b].num_tokens, self._hidden
        width = self._model.vocabulary_size if question.op is Op.LOGITS else self._hidden
        return rows.shape[0], width


def open_shard(task: Assignment, leader: LeaderLink) -> tuple[ShardModel, Exchange]:
    """The part of the model that is asked for, loaded. Raises ``CheckpointError``,
    ``DeviceUnavailable`` and ``GroupLost``.
    """
    if task.device != "cpu":
        # Imported here: a router on a CPU needs no Triton, and takes no time to load it.
        from router_svc.device_group import open_device_shard  # noqa: PLC0415

        return open_device_shard(task, leader)
    parts = load_shard(
        Path(task.model),
        task.rank,
        task.size,
        weights=task.weights,
        exact=task.exact,
        progress=lambda _share: leader.say_loading(),
    )
    return RouterShard(parts), ByLink(leader, parts.spec.hidden_size)


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
        model, exchange = open_shard(task, leader)
        leader.say_loaded()
        log.info("follower.loaded", pid=os.getpid())
        with torch.inference_mode():
            Follower(model, leader, exchange, log).serve()
    except (CheckpointError, DeviceUnavailable) as error:
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking apart what was imported would only take time
