"""The compute thread: one loop that owns scheduler, model, KV cache and plane.

Other threads hand in commands through a bounded queue and a wake-up; results leave by one
callback a step. The loop never spins: without work it sleeps in the plane, where an answer, a lost
lane and a command all wake it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from time import perf_counter_ns

import torch
from ep_kernels.crew import Crew
from ep_kernels.plane import RouterPlane
from structlog.typing import FilteringBoundLogger

from mesh.layer_groups import LayerGroups
from mesh.messages import Delta, FinishReason, Rejected, Submit, View
from mesh.settings import RouterSettings
from moe_model.forward import ServedModel
from router_svc.ahead import Ahead, StepsAhead
from router_svc.blocks import BlockManager
from router_svc.exchange import (
    Cancellation,
    EngineBusyError,
    EngineState,
    Results,
    Submission,
    delta_of,
)
from router_svc.experts import MeshExperts
from router_svc.lanes import Lanes, Reach
from router_svc.loads import Loads
from router_svc.profile import LayerTimes, Phases, Times
from router_svc.recorder import Recorder
from router_svc.scheduler import InadmissibleError, Outcome, Scheduler, StepWork
from router_svc.sequence import Sequence, stop_ids
from router_svc.stall import AwakeClock
from router_svc.step import StepResult, StepRunner
from router_svc.tickets import LaneBytes, Tally

_MAX_COMMANDS = 8192
_MAX_CANCELLATIONS = 16384
_LEAST_ANSWER_TIMEOUT_S = 1.0
_IDLE_WAIT_S = 5.0
_MOST_BETWEEN_LOOKS_S = 0.5
"""Of the time between two looks at what workers owe that counts; there are eight a second."""
_RETRY_AFTER_S = 1.0
_KV_SEQUENCES = 16
_KV_MOST_BYTES = 1 << 30
_WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class _StoppedError(Exception):
    """``stop`` was called while a step waited for experts."""


def kv_cache_blocks(model: ServedModel, settings: RouterSettings) -> int:
    """Blocks of the KV cache: what ``router.kv_cache_bytes`` holds or, where that is 0, room for
    16 sequences of full length within 1 GiB; never less than one such sequence needs.
    """
    block_bytes = model.kv_bytes_per_block(settings.block_size)
    full = -(-model.spec.max_context // settings.block_size)
    if settings.kv_cache_bytes:
        return max(1, settings.kv_cache_bytes // block_bytes)
    return max(full, min(_KV_SEQUENCES * full, _KV_MOST_BYTES // block_bytes))


def answer_timeout_s(settings: RouterSettings) -> float:
    """How long a worker may take for a part before it counts as hung: a third of
    ``router.expert_timeout_s``, so that a replica or its next incarnation has the rest.
    """
    return max(_LEAST_ANSWER_TIMEOUT_S, settings.expert_timeout_s / 3)


class Engine:
    """Runs sequences. ``run`` is the compute thread's body; the methods above it may be called
    from any thread.
    """

    def __init__(
        self,
        model: ServedModel,
        plane: RouterPlane,
        settings: RouterSettings,
        *,
        exact: bool,
        deliver: Callable[[Results], None],
        changed: Callable[[], None],
        log: FilteringBoundLogger,
        reach: Reach,
        matrix_threads: int = 1,
        near: str = "shm",
        ahead: StepsAhead | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deliver`` gets each step's results and ``changed`` is called when ``state.unserved`` or
        ``state.epoch`` changed, both on the compute thread: they must hand over and return.
        ``exact`` must be that of the model and the lanes. ``matrix_threads``: see the setting.
        ``reach`` and ``near``: see ``Lanes``. ``ahead``: steps that the model's device goes through
        by itself, if it can.
        """
        spec = model.spec
        self._model = model
        self._plane = plane
        self._settings = settings
        self._deliver = deliver
        self._changed = changed
        self._log = log
        self._clock = clock
        self._eos_token_ids = spec.eos_token_ids
        self._vocab_size = spec.vocab_size
        self.times = Times(layers=LayerTimes(LayerGroups(spec.num_layers)))
        self.phases = Phases()
        self._commands: deque[Submission | Cancellation] = deque()
        self._next_deadline = math.inf
        self._new_view: View | None = None
        self._stopping = False
        self._results = Results(0)
        self._lanes = Lanes(plane, clock, log, reach, near)
        self._view: View | None = None
        self._unserved = EngineState().unserved
        crew = Crew(matrix_threads - 1)
        self._experts = MeshExperts(
            plane,
            num_experts=spec.num_experts,
            moe_layers=spec.moe_layers,
            capacity_tokens=settings.capacity_tokens,
            replica_choice=settings.replica_choice,
            exact=exact,
            timeout_s=settings.expert_timeout_s,
            answer_timeout_s=answer_timeout_s(settings),
            clock=AwakeClock(clock, _MOST_BETWEEN_LOOKS_S),
            times=self.times,
            crew=crew,
            wire_bytes=_WIRE_BYTES[settings.wire],
        )
        self.recorder = Recorder(self._experts.counts, spec.moe_layers, settings.record_steps)
        blocks = kv_cache_blocks(model, settings)
        self._scheduler = Scheduler(
            BlockManager(blocks, settings.block_size, prefix_cache=settings.prefix_cache),
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            max_context=spec.max_context,
        )
        self._runner = StepRunner(
            model,
            model.new_kv_cache(blocks, settings.block_size),
            self._experts,
            crew=crew,
            micro_batches=settings.micro_batches,
            pump=self._pump,
            wait=self._wait_for_experts,
            times=self.times,
            log=log,
            ahead=None if ahead is None else self._tries(ahead),
        )
        self._in_step = False
        self._dropped = False
        self._turns = 0
        self.state = EngineState(kv_blocks_total=blocks, kv_blocks_free=blocks)

    # -------------------------------------------------------------- any thread

    def submit(self, owner: bytes, submit: Submit) -> None:
        """Queue a sequence for a gateway; raises ``EngineBusyError``."""
        if len(self._commands) >= _MAX_COMMANDS:
            raise EngineBusyError
        deadline = math.inf
        if submit.deadline_ms:
            deadline = self._clock() + submit.deadline_ms / 1000
        self._commands.append(Submission(owner, submit, deadline))
        self._plane.wake()

    def cancel(self, requests: tuple[str, ...]) -> None:
        """End sequences soon, also in a step that waits for experts, and free their blocks.

        Unknown ones are ignored; so are those of a gateway that floods the queue, and run on.
        """
        if len(self._commands) >= _MAX_CANCELLATIONS:
            self._log.warning("cancellation.ignored", reason="the queue of commands is full")
            return
        self._commands.append(Cancellation(requests))
        self._plane.wake()

    def cancel_all_of(self, owner: bytes) -> None:
        """End all sequences of a gateway soon."""
        self._commands.append(Cancellation((), owner))
        self._plane.wake()

    def set_view(self, view: View) -> None:
        """Use a newer view of the mesh, as soon as the thread gets to it."""
        self._new_view = view
        self._plane.wake()

    def stop(self) -> None:
        """Make ``run`` return soon; sequences that have not finished end as cancelled."""
        self._stopping = True
        self._plane.wake()

    def wake(self) -> None:
        """Make a thread without work take a turn."""
        self._plane.wake()

    @property
    def turns(self) -> tuple[int, int, int]:
        """Changes while the thread gets on, with work or, soon after ``wake``, without."""
        return (self._turns, self._experts.step, self._experts.tally.dispatches)

    @property
    def progress(self) -> tuple[int, int] | None:
        """Changes whenever the step under way gets on; None between steps."""
        return (self._experts.step, self._experts.tally.dispatches) if self._in_step else None

    @property
    def corrupt_lanes(self) -> int:
        """Lanes dropped because the worker wrote nonsense, since start."""
        return self._plane.corrupt_lanes

    def loads(self) -> Loads:
        """What went to each expert and rank since start."""
        experts = self._experts
        return Loads(
            tokens=self.times.tokens,
            experts=experts.counts.tokens.copy(),
            decodes=experts.counts.decodes.copy(),
            epoch=experts.epoch,
            ranks=experts.ranks,
            rank_pairs={rank: tuple(pairs) for rank, pairs in tuple(experts.rank_pairs.items())},
        )

    @property
    def tally(self) -> Tally:
        """What was sent to experts since start; read by any thread."""
        return self._experts.tally

    @property
    def lane_bytes(self) -> dict[str, LaneBytes]:
        """Peer -> what has gone over its lane since start; a copy, for any thread."""
        return dict(self._experts.lane_bytes)

    @property
    def group_wait_ns(self) -> int:
        """Time spent waiting for the other processes of this router, since start."""
        return self._model.waited_ns

    @property
    def copy_ns(self) -> int:
        """Time spent writing parts into lanes, since start."""
        return self._plane.copy_ns

    @property
    def signal_ns(self) -> int:
        """Time spent publishing parts and waking workers, since start."""
        return self._plane.signal_ns

    # -------------------------------------------------------------- the compute thread

    def run(self) -> None:
        """Serve until ``stop``, then end what is left as cancelled and close the plane. An
        exception out of here is a bug: the process should end.
        """
        torch.set_num_threads(self._settings.threads)
        with torch.inference_mode():
            try:
                while not self._stopping:
                    self._turn()
            except _StoppedError:
                pass
        for sequence in tuple(self._scheduler):
            self._scheduler.drop(sequence.request)
            self._end(sequence, "cancelled")
        self._publish_state()
        self._hand_over()
        self._plane.close()

    def _turn(self) -> None:
        self._turns += 1
        self._take_view()
        self._take_commands()
        self._expire()
        self._tend_lanes()
        if len(self._scheduler):
            self._step()
        else:
            self._publish_state()
            self._hand_over()
            self._plane.wait(min(self._lanes.next_try_s(), _IDLE_WAIT_S))
            self._pump()

    def _step(self) -> None:
        started = perf_counter_ns()
        scheduler = self._scheduler
        self._experts.step += 1
        self._in_step = True
        work = scheduler.schedule()
        for sequence in work.preempted:
            self._log.info("sequence.preempted", trace=sequence.trace, request=sequence.request)
        self._note_begun(work)
        self.recorder.begin_step()
        outcome = self._runner.run(work)
        self.recorder.end_step(sum(chunk.count for chunk in work.chunks))
        self._hand_over()  # what no wait for experts has delivered yet
        if outcome.failed:
            self._end_failed(work, outcome)
        now = self._clock()
        for done in scheduler.finish_step(work, outcome.drawn):
            self._note_progress(done, now)
            logprob = outcome.logprobs.get(done.sequence.request)
            self._results.add(done.sequence.owner, delta_of(done, logprob))
        self.times.steps += 1
        self._in_step = False
        self._publish_state()
        self.times.step_ns += perf_counter_ns() - started

    def _note_begun(self, work: StepWork) -> None:
        now = self._clock()
        for chunk in work.chunks:
            sequence = chunk.sequence
            if not sequence.begun_at:
                sequence.begun_at = now
                if sequence.owner:
                    self.phases.queue.observe(now - sequence.queued_at)

    def _note_progress(self, done: Outcome, now: float) -> None:
        sequence = done.sequence
        if not sequence.first_at:
            sequence.first_at = now
            if sequence.owner:
                self.phases.prefill.observe(now - sequence.begun_at)
        if done.finish is None or not sequence.owner:
            return
        self.phases.decode.observe(now - sequence.first_at)
        self._log.info(
            "sequence.finished",
            trace=sequence.trace,
            request=sequence.request,
            reason=done.finish,
            tokens=sequence.num_output,
            queue_ms=round((sequence.begun_at - sequence.queued_at) * 1000, 1),
            prefill_ms=round((sequence.first_at - sequence.begun_at) * 1000, 1),
            decode_ms=round((now - sequence.first_at) * 1000, 1),
        )

    def _end_failed(self, work: StepWork, outcome: StepResult) -> None:
        for chunk in work.chunks:
            sequence = chunk.sequence
            failure = outcome.failed.get(sequence.request)
            if failure is not None and self._scheduler.holds(sequence):
                self._scheduler.drop(sequence.request, distrust=not failure.unavailable)
                self._end(
                    sequence, "error", failure.reason, "unavailable" if failure.unavailable else ""
                )

    def _end(
        self, sequence: Sequence, finish: FinishReason, reason: str = "", error_kind: str = ""
    ) -> None:
        """Tell the gateway of a sequence that ended without a token; it is dropped already."""
        if finish == "error":
            self._log.warning(
                "sequence.failed", trace=sequence.trace, request=sequence.request, reason=reason
            )
        self._results.add(
            sequence.owner,
            Delta(request=sequence.request, finish=finish, error=reason, error_kind=error_kind),
        )

    def _publish_state(self) -> None:
        scheduler = self._scheduler
        self.state = EngineState(
            step=self._experts.step,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_blocks_total=scheduler.blocks.num_blocks,
            kv_blocks_free=scheduler.blocks.num_free,
            lane_slots_in_use=self._plane.in_flight(),
            epoch=self._experts.epoch,
            unserved=self._unserved,
            lanes=len(self._plane.peers()),
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def _hand_over(self) -> None:
        """Deliver what there is for gateways.

        Who receives it runs Python on another thread. So a step's results are delivered when this
        thread next sleeps, normally in the first layer with experts of the next step, or when that
        step ends: the two do not take the interpreter from each other.
        """
        results = self._results
        if results.deltas or results.rejected:
            results.step = self._experts.step
            self._results = Results(0)
            self._deliver(results)

    # -------------------------------------------------------------- commands

    def _take_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Submission):
                self._start(command)
            else:
                self._cancel(command)

    def _start(self, command: Submission) -> None:
        submit = command.submit
        sequence = Sequence(
            request=submit.request,
            owner=command.owner,
            trace=submit.trace,
            prompt_len=len(submit.prompt),
            tokens=[*submit.prompt, *submit.output],
            sampling=submit.sampling,
            stop_ids=stop_ids(submit.sampling, self._eos_token_ids),
            priority=submit.priority,
            deadline=command.deadline,
            queued_at=self._clock(),
        )
        try:
            self._check_token_ids(sequence)
            self._scheduler.add(sequence)
        except InadmissibleError as error:
            self._log.info("sequence.rejected", trace=submit.trace, reason=error.reason)
            retry_after_s = _RETRY_AFTER_S if error.retry else 0.0
            self._results.rejected.append(
                (
                    command.owner,
                    Rejected(
                        request=submit.request, reason=error.reason, retry_after_s=retry_after_s
                    ),
                )
            )
        else:
            self._next_deadline = min(self._next_deadline, sequence.deadline)
            self._log.info(
                "sequence.queued",
                trace=submit.trace,
                request=submit.request,
                prompt_tokens=len(submit.prompt),
                output_tokens=len(submit.output),
            )

    def _check_token_ids(self, sequence: Sequence) -> None:
        """Numbers from a gateway index tensors here; one out of range must not end a batch."""
        sampling = sequence.sampling
        ids: SequenceOf[int] = (
            *sequence.tokens,
            *sampling.stop_token_ids,
            *(token for token, _bias in sampling.logit_bias),
        )
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise InadmissibleError(
                f"token id {wrong} is not in the vocabulary of {self._vocab_size}", retry=False
            )

    def _cancel(self, command: Cancellation) -> None:
        requests: SequenceOf[str] = command.requests
        if command.owner is not None:
            requests = [s.request for s in self._scheduler if s.owner == command.owner]
        for request in requests:
            sequence = self._scheduler.drop(request)
            if sequence is not None:
                self._dropped = True
                self._log.info("sequence.cancelled", trace=sequence.trace, request=request)
                self._end(sequence, "cancelled")

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_deadline:
            return
        for sequence in [s for s in self._scheduler if s.deadline <= now]:
            self._scheduler.drop(sequence.request)
            self._dropped = True
            self._end(sequence, "error", "the request took longer than its deadline")
        self._next_deadline = min((s.deadline for s in self._scheduler), default=math.inf)

    def _tries(self, ahead: StepsAhead) -> Ahead:
        return Ahead(
            ahead,
            self._experts,
            pump=self._pump,
            launched=self._hand_over,
            times=self.times,
            log=self._log,
            wire_bytes=_WIRE_BYTES[self._settings.wire],
        )

    # -------------------------------------------------------------- the mesh

    def _take_view(self) -> None:
        view = self._new_view
        if view is None:
            return
        self._new_view = None
        self._view = view
        closed = self._lanes.want(view.members)
        self._route(closed)

    def _tend_lanes(self) -> None:
        if self._lanes.tend(busy=len(self._scheduler) > 0):
            self._route([])

    def _pump(self) -> None:
        """Let tickets take what has arrived, and follow changes of the mesh meanwhile."""
        lost = self._experts.pump()
        hung, slow = self._experts.overdue()
        if lost or hung:
            for lane in lost:
                self._log.warning("lane.lost", peer=lane.peer, reason=lane.reason)
                self._lanes.lost(lane.peer)
            for peer in hung:
                self._log.error("worker.hung", peer=peer, reason="it does not answer its parts")
                self._lanes.hung(peer)
            self._route([*(lane.peer for lane in lost), *hung])
        for peer in slow:
            self._log.warning("worker.slow", peer=peer, reason="what others serve goes to them")
        if self._new_view is not None:
            self._take_view()

    def _wait_for_experts(self) -> bool:
        """A step's micro-batches all wait. Lanes are tended meanwhile, since what they wait for may
        be an expert whose worker has just come back, and requests end that are cancelled or past
        their deadline. Returns whether sequences were dropped.
        """
        self._turns += 1
        if self._stopping:
            raise _StoppedError
        self._dropped = False
        if self._commands:
            self._take_commands()
        self._expire()
        self._hand_over()
        if self._dropped:
            return True
        retry_s = self._experts.next_retry_s(_IDLE_WAIT_S)
        if self._experts.parked:
            self._tend_lanes()
            retry_s = min(retry_s, self._lanes.next_try_s())
        if self._next_deadline < math.inf:
            retry_s = min(retry_s, max(0.0, self._next_deadline - self._clock()))
        self._plane.wait(retry_s)
        return False

    def _route(self, gone: list[str]) -> None:
        """Route by the newest placement and the lanes as they are; send again what was under way
        to ``gone`` peers.
        """
        view = self._view
        if view is not None and view.placement is not None:
            placement = view.placement
            if placement.epoch >= self._experts.epoch:
                lanes = self._lanes
                self._experts.route_by(placement, lanes.serving(), lanes.coming(), lanes.silent())
        for peer in gone:
            self._experts.lane_lost(peer)
        self._unserved = self._describe_unserved()
        if (self._unserved, self._experts.epoch) != (self.state.unserved, self.state.epoch):
            self._publish_state()
            self._changed()

    def _describe_unserved(self) -> str:
        missing = self._experts.unserved
        if not missing:
            return ""
        view = self._view
        if view is None or view.placement is None:
            return EngineState().unserved
        serving = self._lanes.serving()
        absent = [rank for rank in view.placement.ranks if rank not in serving]
        experts = sum(len(experts) for experts in missing.values())
        return f"{experts} experts have no worker with a lane to this router" + (
            f"; not serving: {', '.join(absent)}" if absent else ""
        )
