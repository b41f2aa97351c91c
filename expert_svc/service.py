"""The expert worker's process: lanes, membership and loading around the compute thread.

Three threads: the event loop (control messages), compute (``Worker.run``, the only user of the
data plane) and the loader (``SlotTable.apply``). The event loop never waits for the others.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from ep_kernels.plane import PlaneError
from ep_kernels.shm.expert import ShmExpertPlane

from expert_svc.heap import is_out_of_memory, trim_heap
from expert_svc.metrics import ExpertCollector
from expert_svc.slots import SlotError, SlotTable, SupersededError
from expert_svc.worker import Worker
from mesh.member import Member, RefusedByPlanner
from mesh.messages import AssignSlots, Hello, Load, SlotsReady
from mesh.rundir import lanes_path, planner_address
from mesh.service import CannotServe, Context
from mesh.supervise import Supervisor
from moe_model.checkpoint import Checkpoint
from moe_model.errors import CheckpointError
from moe_model.experts import new_bank, read_expert
from moe_model.shipped import checkpoint_dir
from moe_model.spec import ModelSpec, load_spec, serving_digest
from moe_model.tensors import TensorTable


class ExpertWorker:
    """The actors of one expert worker and what they share."""

    def __init__(
        self, ctx: Context, table: SlotTable, worker: Worker, *, lanes: str, digest: str
    ) -> None:
        self._ctx = ctx
        self._table = table
        self._worker = worker
        self._lanes = lanes
        self._digest = digest
        self._loop = asyncio.get_running_loop()
        self._command: AssignSlots | None = None
        """Newest assignment; another one makes the loader stop early."""
        self._loading: AssignSlots | None = None
        self._assigned = asyncio.Event()
        self._served = False
        self._member = Member(
            ctx.net,
            planner_address(ctx.settings),
            hello=self._hello,
            load=self._load,
            on_view=lambda _view: None,
            on_command=self._assign,
            log=ctx.log,
        )
        self._member.set_state("joining", detail="waiting for slots", progress=0.0)

    async def belong(self) -> None:
        """Be a member of the mesh. Raises ``RefusedByPlanner``."""
        await self._member.run()

    async def compute(self) -> None:
        """Run the compute thread until cancelled; what it raises ends the service."""
        with self._pool("compute") as pool:
            try:
                await self._loop.run_in_executor(pool, self._worker.run)
            finally:
                self._worker.stop()

    async def load(self) -> None:
        """Carry out one assignment after another on the loader thread."""
        with self._pool("loader") as pool:
            try:
                while True:
                    await self._assigned.wait()
                    self._assigned.clear()
                    if (command := self._command) is not None:
                        self._loading = command
                        await self._carry_out(command, pool)
                        self._loading = None
            finally:
                self._command = None

    def _pool(self, name: str) -> ThreadPoolExecutor:
        # OpenMP keeps the number of threads per calling thread.
        return ThreadPoolExecutor(
            1, name, torch.set_num_threads, (self._ctx.settings.expert.threads,)
        )

    def _assign(self, command: AssignSlots) -> None:
        if self._loading is not None and command.command == self._loading.command:
            return  # the planner repeats what is under way
        self._command = command
        self._assigned.set()

    async def _carry_out(self, command: AssignSlots, pool: ThreadPoolExecutor) -> None:
        """Load what the planner asked for and acknowledge. Raises ``CannotServe``."""
        log = self._ctx.log.bind(command=command.command, epoch=command.epoch)
        try:
            loaded = await self._loop.run_in_executor(pool, self._apply, command)
        except SupersededError:
            log.info("slots.superseded")
            return
        except (SlotError, CheckpointError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            reason = str(error) or "out of memory"
            log.error("slots.failed", error=reason)  # noqa: TRY400 - an answer, not a bug
            self._member.set_state("loading", detail=reason, progress=0.0)
            self._acknowledge(command, reason)
            if isinstance(error, CheckpointError):
                raise CannotServe(reason) from error  # trying again would read the same bytes
            return
        log.info("slots.loaded", experts=loaded, resident_bytes=self._table.resident_bytes())
        self._member.set_state("ready")
        if not self._served:
            self._served = True
            self._ctx.ready()
        self._acknowledge(command, "")

    def _apply(self, command: AssignSlots) -> int:
        """On the loader thread."""
        loaded = self._table.apply(
            command.moe_layers,
            command.slots,
            command.epoch,
            progress=self._report,
            superseded=lambda: self._command is not command,
        )
        if loaded:
            trim_heap()
        return loaded

    def _report(self, share: float) -> None:
        """On the loader thread."""
        self._loop.call_soon_threadsafe(self._progressed, share)

    def _progressed(self, share: float) -> None:
        if share < 1.0:
            self._member.set_state("loading", detail="loading experts", progress=share)

    def _acknowledge(self, command: AssignSlots, error: str) -> None:
        # A lost acknowledgement is repaired by the planner, which repeats the command.
        self._member.send(
            SlotsReady(
                id=self._ctx.id,
                incarnation=self._ctx.incarnation,
                command=command.command,
                epoch=command.epoch,
                error=error,
            )
        )

    def _hello(self) -> Hello:
        ctx = self._ctx
        return Hello(
            id=ctx.id,
            role="expert",
            incarnation=ctx.incarnation,
            pid=ctx.pid,
            host=ctx.host,
            model_digest=self._digest,
            lanes=self._lanes,
            metrics=ctx.metrics_url,
            num_slots=ctx.settings.expert.slots_per_layer,
        )

    def _load(self) -> Load:
        return Load(
            step=self._worker.tally.calls,
            epoch=self._table.epoch,
            resident_bytes=self._table.resident_bytes(),
        )


async def main(ctx: Context) -> None:
    """Serve until ``ctx.stopping``. Raises ``CannotServe``, ``RefusedByPlanner`` or a crash."""
    settings = ctx.settings
    torch.set_num_threads(settings.expert.threads)
    with ExitStack() as stack:
        try:
            path = checkpoint_dir(settings.model.path)
            spec = load_spec(path)
            digest = serving_digest(path, settings.model.weights, settings.model.exact)
            table = _open_table(ctx, path, spec, stack)
            lanes = lanes_path(settings, ctx.id)
            plane = ShmExpertPlane(
                ctx.id,
                ctx.incarnation,
                lanes,
                hidden=spec.hidden_size,
                digest=digest,
                max_lanes=settings.expert.max_lanes,
            )
        except (CheckpointError, PlaneError) as error:
            raise CannotServe(str(error)) from error
        stack.callback(plane.close)
        worker = Worker(plane, table)
        ctx.registry.register(ExpertCollector(worker, table))
        expert = ExpertWorker(ctx, table, worker, lanes=lanes, digest=digest)
        async with Supervisor(ctx.log, quiet=(RefusedByPlanner,)) as actors:
            actors.start("expert.compute", expert.compute)
            actors.start("expert.load", expert.load)
            actors.start("expert.member", expert.belong)
            await ctx.stopping.wait()


def _open_table(ctx: Context, path: Path, spec: ModelSpec, stack: ExitStack) -> SlotTable:
    checkpoint = stack.enter_context(Checkpoint(path))
    # Slots may name any expert later: a gap in the checkpoint is to show before anyone is served.
    checkpoint.check(TensorTable(spec).experts())
    model = ctx.settings.model
    return SlotTable(
        spec.moe_layers,
        spec.num_experts,
        lambda num_slots: new_bank(spec, num_slots, weights=model.weights, exact=model.exact),
        lambda layer, index: read_expert(checkpoint, spec, layer, index),
        max_slots=ctx.settings.expert.slots_per_layer,
    )
