"""The expert worker's process: lanes, membership and loading around the compute thread.

Four threads: the event loop (control messages, bundles' bytes), compute (``Worker.run``, the only
user of the data plane), the loader (``SlotTable.apply``) and one that packs bundles for peers. The
event loop never waits for the others, nor compute for more than the microseconds in which a slot
changes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from ep_kernels.crew import Crew
from ep_kernels.plane import ExpertPlane, PlaneError
from ep_kernels.planes import Listening, expert_plane
from ep_kernels.tcp.expert import TcpExpertPlane
from ep_kernels.tcp.handshake import new_key
from ep_kernels.triton.device import Device, DeviceUnavailable

from expert_svc.binding import Binding, bind, binding
from expert_svc.bundles import BundleClient, BundleServer
from expert_svc.engines import Engine, open_engine
from expert_svc.heap import trim_heap
from expert_svc.loading import Fetch, Held, SupersededError
from expert_svc.metrics import ExpertCollector
from expert_svc.slots import Applied, Fault, SlotError, SlotTable
from expert_svc.worker import ComputeThread
from mesh.addresses import TCP, join, ports_of
from mesh.hosts import advertised, host_id, listen_host
from mesh.member import Command, Member, RefusedByPlanner
from mesh.membership import FINAL
from mesh.messages import AssignSlots, Hello, Load, MemberState, SlotsReady, View
from mesh.metrics import export_link
from mesh.placement import EMPTY
from mesh.processes import name_thread
from mesh.rundir import bundles_address, lanes_path, planner_address
from mesh.service import CannotServe, Context
from mesh.supervise import Supervisor
from moe_model.checkpoint import Checkpoint
from moe_model.errors import CheckpointError
from moe_model.experts import read_expert
from moe_model.shipped import checkpoint_dir
from moe_model.spec import ModelSpec, load_spec, serving_digest
from moe_model.tensors import TensorTable

_OTHERS_SAY_S = 0.5
"""Whoever was told to leave at the same moment has said so by then."""


@dataclass(frozen=True, slots=True)
class LanePlaces:
    """Where routers open lanes, as ``Hello`` says it."""

    path: str
    tcp: str = field(default="", repr=False)
    """With the key."""


class ExpertWorker:
    """The actors of one expert worker and what they share."""

    def __init__(
        self,
        ctx: Context,
        table: SlotTable[Any],
        worker: ComputeThread[Any],
        *,
        lanes: LanePlaces,
        digest: str,
        binding: Binding = Binding(),  # noqa: B008 - immutable
    ) -> None:
        self._ctx = ctx
        self._binding = binding
        self._table = table
        self._worker = worker
        self._lanes = lanes
        self.bundles = ""
        """Where peers fetch experts; to be set before ``belong``."""
        self._digest = digest
        self._loop = asyncio.get_running_loop()
        self._command: AssignSlots | None = None
        """Newest assignment."""
        self._answer: SlotsReady | None = None
        """What was said to it, once it was carried out."""
        self._loading: AssignSlots | None = None
        self._superseded = threading.Event()
        """Set, the assignment under way stops early."""
        self._assigned = asyncio.Event()
        self._served = False
        self._leaving = False
        self._relieved = asyncio.Event()
        """Something changed that may let a worker go which is to leave."""
        self._member = Member(
            ctx.net,
            planner_address(ctx.settings),
            hello=self._hello,
            load=self._load,
            on_view=self._on_view,
            on_command=self._assign,
            log=ctx.log,
        )
        self._member.set_state("joining", detail="waiting for slots", progress=0.0)
        self._loads_seen = 0
        """Reports of the loader."""
        ctx.health.why_not_ready = self._why_not_ready
        ctx.health.watch("compute", lambda: worker.tally.turns, worker.wake)
        ctx.health.watch("loader", self._load_count)

    async def belong(self) -> None:
        """Be a member of the mesh. Raises ``RefusedByPlanner``."""
        await self._member.run()

    async def relieved(self) -> None:
        """Ask for this worker's experts to be taken over, and wait until none is placed here, or
        nobody is left who could take or use them. Where all stop, routers come first: what they
        have under way ends with the experts that are here.
        """
        self._leaving = True
        if self._served:
            self._show("draining", detail="stopping")
            await asyncio.sleep(_OTHERS_SAY_S)
        while self._served and self._is_needed():
            self._relieved.clear()
            await self._relieved.wait()

    async def compute(self) -> None:
        """Run the compute thread until cancelled; what it raises ends the service."""
        with self._pool("compute") as pool:
            try:
                await self._loop.run_in_executor(pool, self._compute)
            finally:
                self._worker.stop()

    def _compute(self) -> None:
        """The compute thread's body."""
        bind(self._binding, self._ctx.log)
        # Helpers may run where the thread may that hires them.
        Crew(self._ctx.settings.expert.threads - 1).share()
        self._worker.run()

    async def load(self) -> None:
        """Carry out one assignment after another on the loader thread."""
        with self._pool("loader") as pool:
            try:
                while True:
                    await self._assigned.wait()
                    self._assigned.clear()
                    if (command := self._command) is not None:
                        self._superseded = threading.Event()
                        self._loading = command
                        await self._carry_out(command, pool)
                        self._loading = None
            finally:
                self._superseded.set()

    def heal(self, layer: int, expert: int, held: Held) -> None:
        """An expert in memory has gone bad: never serve it again, and load it anew. Any thread."""
        self._table.discard(layer, expert, held)
        self._loop.call_soon_threadsafe(self._assigned.set)

    def _pool(self, name: str) -> ThreadPoolExecutor:
        def begin() -> None:
            name_thread(name)
            # OpenMP keeps the number of threads per calling thread.
            torch.set_num_threads(self._ctx.settings.expert.threads)

        return ThreadPoolExecutor(1, name, begin)

    def _assign(self, command: Command) -> None:
        if not isinstance(command, AssignSlots):
            self._ctx.log.warning("command.unexpected", command=command.command)
        elif command == self._command and self._answer is not None:
            self._member.send(self._answer)  # the planner has missed it
        elif self._loading is None or command.command != self._loading.command:
            self._command, self._answer = command, None
            self._relieved.set()
            self._superseded.set()
            self._assigned.set()

    async def _carry_out(self, command: AssignSlots, pool: ThreadPoolExecutor) -> None:
        """Load what the planner asked for and acknowledge. Raises ``CannotServe``."""
        log = self._ctx.log.bind(command=command.command, epoch=command.epoch)
        began = monotonic()
        try:
            applied = await self._loop.run_in_executor(pool, self._apply, command, self._superseded)
        except SupersededError:
            log.info("slots.superseded")
            return
        except (SlotError, CannotServe) as error:
            log.error("slots.failed", error=str(error))  # noqa: TRY400 - an answer, not a bug
            if not self._served:
                self._show("loading", detail=str(error), progress=0.0)
            self._acknowledge(command, error=str(error))
            if isinstance(error, CannotServe):
                raise
            return
        seconds = monotonic() - began
        log.info(
            "slots.loaded",
            experts=applied.loaded,
            from_peers=applied.from_peers,
            loaded_bytes=applied.loaded_bytes,
            seconds=round(seconds, 3),
            faults=len(applied.faults),
            resident_bytes=self._table.resident_bytes(),
        )
        self._become_ready(command, applied)
        self._acknowledge(command, applied=applied, seconds=seconds)

    def _become_ready(self, command: AssignSlots, applied: Applied) -> None:
        detail = ""
        if applied.faults:
            first = applied.faults[0]
            detail = (
                f"{len(applied.faults)} slots are empty: expert {first.expert} of layer "
                f"{first.layer}: {first.reason}"
            )
        holds = any(expert != EMPTY for layer in self._table.held() for expert in layer)
        wants = any(expert != EMPTY for layer in command.slots for expert in layer)
        if not (self._served or holds or not wants):
            self._show("loading", detail=detail, progress=0.0)
            return
        self._show("ready", detail=detail)
        if not self._served:
            self._served = True
            self._ctx.ready()

    def _apply(self, command: AssignSlots, superseded: threading.Event) -> Applied:
        """On the loader thread."""
        applied = self._table.apply(
            command.moe_layers,
            command.slots,
            command.epoch,
            superseded=superseded,
            progress=self._report,
            on_fault=self._on_fault,
            sources=command.sources,
            bytes_per_s=command.bytes_per_s,
        )
        if applied.loaded:
            trim_heap()
        self._worker.warm_up(self._report)
        return applied

    def _on_fault(self, fault: Fault) -> None:
        """On the loader thread. Raises ``CannotServe`` for a checkpoint that never was good."""
        self._ctx.log.warning(
            "expert.not_loaded",
            layer=fault.layer,
            slot=fault.slot,
            expert=fault.expert,
            kind=fault.kind,
            reason=fault.reason,
            peer=fault.peer,
        )
        if fault.kind == "unreadable" and not fault.peer and not self._served:
            raise CannotServe(fault.reason)  # trying again would read the same bytes

    def _report(self, share: float) -> None:
        """On the loader thread."""
        self._loop.call_soon_threadsafe(self._progressed, share)

    def _progressed(self, share: float) -> None:
        self._loads_seen += 1
        if share < 1.0:
            # A worker that serves goes on with it while it loads.
            state: MemberState = "ready" if self._served else "loading"
            self._show(state, detail="loading experts", progress=share)

    def _show(self, state: MemberState, *, detail: str = "", progress: float = 1.0) -> None:
        """What the planner is told of this worker; one that serves and is to leave drains."""
        if self._leaving and state == "ready":
            state = "draining"
        self._member.set_state(state, detail=detail, progress=progress)

    def _load_count(self) -> int | None:
        """What changes while experts are loaded that the worker is to begin with; one that serves
        is not given up because others take long to come.
        """
        return None if self._served or self._loading is None else self._loads_seen

    def _why_not_ready(self) -> str:
        if self._leaving:
            return "the worker is stopping"
        if self._served:
            return ""
        return f"the worker is {self._member.state}: {self._member.detail or 'no experts yet'}"

    def _is_needed(self) -> bool:
        """Whether experts are placed here that a router may use and another worker may take."""
        command, view = self._command, self._member.view
        if command is None or view is None:
            return False
        placed = any(expert != EMPTY for layer in command.slots for expert in layer)
        routers = [m for m in view.members if m.role == "router" and m.state not in FINAL]
        others = any(
            m.role == "expert" and m.id != self._ctx.id and m.state not in FINAL | {"draining"}
            for m in view.members
        )
        all_stop = all(router.state == "draining" for router in routers)
        return placed and bool(routers) and (others or all_stop)

    def _on_view(self, view: View) -> None:
        del view  # the member keeps it
        self._relieved.set()

    def _acknowledge(
        self,
        command: AssignSlots,
        *,
        error: str = "",
        applied: Applied = Applied(),  # noqa: B008 - immutable
        seconds: float = 0.0,
    ) -> None:
        # A lost acknowledgement is repaired by the planner, which repeats the command.
        answer = SlotsReady(
            id=self._ctx.id,
            incarnation=self._ctx.incarnation,
            command=command.command,
            epoch=command.epoch,
            error=error,
            faults=applied.faults,
            loaded=applied.loaded,
            from_peers=applied.from_peers,
            loaded_bytes=applied.loaded_bytes,
            seconds=seconds,
        )
        # What failed is tried again when the planner repeats its command.
        if command == self._command and not (answer.error or answer.faults):
            self._answer = answer
        self._member.send(answer)

    def _hello(self) -> Hello:
        ctx = self._ctx
        return Hello(
            id=ctx.id,
            role="expert",
            incarnation=ctx.incarnation,
            pid=ctx.pid,
            pid_namespace=ctx.pid_namespace,
            host=ctx.host,
            model_digest=self._digest,
            lanes=self._lanes.path,
            lanes_tcp=self._lanes.tcp,
            host_id=host_id(ctx.settings),
            bundles=self.bundles,
            speed=ctx.settings.expert.speed,
            metrics=ctx.metrics_url,
            num_slots=ctx.settings.expert.slots_per_layer,
        )

    def _load(self) -> Load:
        tally = self._worker.tally
        return Load(
            step=tally.calls,
            pairs=tally.pairs,
            ffn_ns=tally.ffn_ns,
            epoch=self._table.epoch,
            resident_bytes=self._table.resident_bytes(),
        )


async def main(ctx: Context) -> None:
    """Serve until ``ctx.stopping``. Raises ``CannotServe``, ``RefusedByPlanner`` or a crash."""
    settings = ctx.settings
    chosen = binding(
        settings.expert.cpus,
        ctx.effective.origin["expert.cpus"],
        ctx.cpus,
        os.sched_getaffinity(0),
    )
    torch.set_num_threads(settings.expert.threads)
    with ExitStack() as stack:
        try:
            path = checkpoint_dir(settings.model.path)
            spec = load_spec(path)
            digest = serving_digest(
                path, settings.model.weights, settings.model.exact, settings.router.tp
            )
            engine = open_engine(settings, path, spec)
            table = _open_table(ctx, path, spec, engine, BundleClient(ctx.net).fetch, stack)
            plane, lanes = _open_lanes(ctx, spec.hidden_size, digest, engine.device)
        except (CheckpointError, PlaneError, DeviceUnavailable) as error:
            raise CannotServe(str(error)) from error
        stack.callback(plane.close)
        worker = engine.new_worker(plane, table)
        expert = ExpertWorker(ctx, table, worker, lanes=lanes, digest=digest, binding=chosen)
        server = BundleServer(
            ctx.net,
            bundles_address(settings, ctx.id),
            table,
            on_corrupt=expert.heal,
            log=ctx.log,
        )
        expert.bundles = advertised(settings, server.link.address)
        export_link(ctx.registry, "bundles", server.link)
        ctx.registry.register(ExpertCollector(worker, table, server, engine.device))
        async with Supervisor(ctx.log, quiet=(RefusedByPlanner,)) as actors:
            actors.start("expert.compute", expert.compute)
            actors.start("expert.load", expert.load)
            actors.start("expert.bundles", server.run)
            actors.start("expert.member", expert.belong)
            await ctx.stopping.wait()
            await ctx.until_drained(expert.relieved())


def _open_lanes(
    ctx: Context, hidden: int, digest: str, device: Device | None
) -> tuple[ExpertPlane, LanePlaces]:
    """Listen where the settings say. Raises ``CannotServe``, ``PlaneError``, ``HostError``."""
    settings, network = ctx.settings, ctx.settings.network
    chosen = network.data_plane
    path = lanes_path(settings, ctx.id) if chosen in ("auto", "shm", "symm") else ""
    host = "" if chosen in ("shm", "symm") else listen_host(settings)
    if not host and not path:
        raise CannotServe(f"network.data_plane = {chosen!r} needs network.listen: where to listen")
    key = new_key()
    plane = expert_plane(
        chosen,
        ctx.id,
        ctx.incarnation,
        hidden,
        digest,
        settings.expert.max_lanes,
        at=Listening(path, host, ports_of(network.ports), key),
        silence_s=network.lane_silence_ms / 1000,
        device=device,
    )
    if not isinstance(plane, TcpExpertPlane):
        return plane, LanePlaces(path)
    carrier = "tcp" if chosen == "auto" else chosen
    place = advertised(settings, join(host, plane.port)).removeprefix(TCP)
    return plane, LanePlaces(path, f"{carrier}://{place}#{key.hex()}")


def _open_table(
    ctx: Context,
    path: Path,
    spec: ModelSpec,
    engine: Engine,
    fetch: Fetch,
    stack: ExitStack,
) -> SlotTable[Any]:
    checkpoint = stack.enter_context(Checkpoint(path))
    # Slots may name any expert later: a gap in the checkpoint is to show before anyone is served.
    checkpoint.check(TensorTable(spec).experts())
    return SlotTable(
        spec.moe_layers,
        spec.num_experts,
        engine.new_bank,
        lambda layer, index: read_expert(checkpoint, spec, layer, index),
        fetch=fetch,
        max_slots=ctx.settings.expert.slots_per_layer,
    )
