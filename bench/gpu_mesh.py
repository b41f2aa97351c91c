"""The exchange between routers and expert ranks on one card, and what runs around it on a router.

All ranks' inboxes lie on the same card, so speeds are of its own memory rather than of NVLink. With
``all-to-all`` they belong to one process, whose three steps (dispatch, the experts, combine) are
captured as CUDA graphs and timed apart. ``all-to-all, processes`` has an expert rank in another
process, reached through CUDA IPC: the card then gives its time to one process after the other, so
its figure is a check with a round trip, not a latency.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ep_kernels.triton.all_to_all.end import ExchangeShape, Peer
from ep_kernels.triton.all_to_all.exchange import Arrived, ExpertExchange, RouterExchange
from ep_kernels.triton.all_to_all.inbox import InboxLayout, Wire
from ep_kernels.triton.all_to_all.plan import Pairs
from ep_kernels.triton.all_to_all.reference import over_the_wire
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer, attach_cuda, create_cuda
from ep_kernels.triton.all_to_all.traffic import Message, answer_bytes, request_bytes
from ep_kernels.triton.attention import CacheRows, Queries, attend, reference_attend
from ep_kernels.triton.rows import latent_rows, reference_rms_norm, rms_norm
from ep_kernels.triton.sampling import Draws, kept, reference_kept, sample, sample_and_cuts
from gpu_harness import COPY, Meter, largest_error

DEEPEP_US = {"dispatch": 77.0, "combine": 114.0}
"""Published by DeepEP for its low-latency kernels: 128 tokens x 7168, top-8, FP8 out and bf16 back,
8 ranks of an H800 node over NVLink."""
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Sizes:
    hidden: int = 7168
    top_k: int = 8
    ranks: int = 8
    slots: int = 32
    """Of a rank."""
    tokens: tuple[int, ...] = (128, 4096)
    rounds: int = 30


FULL = Sizes()


def own_buffer(layout: InboxLayout, device: torch.device) -> SymmetricBuffer:
    data = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
    return SymmetricBuffer(data.data_ptr(), data.numel(), data, data)


def random_pairs(tokens: int, sizes: Sizes, device: torch.device) -> Pairs:
    chosen = torch.rand(tokens, sizes.ranks * sizes.slots, device=device).argsort(1)
    chosen = chosen[:, : sizes.top_k].int().contiguous()
    return Pairs(
        rank=chosen // sizes.slots,
        slot=chosen % sizes.slots,
        expert=chosen,
        weight=torch.rand(tokens, sizes.top_k, device=device),
    )


def held_by(rank: int, slots: int, device: torch.device) -> torch.Tensor:
    return torch.arange(slots, dtype=torch.int32, device=device) + rank * slots


def experts_output(exchange: ExpertExchange, arrived: Arrived, held: torch.Tensor) -> torch.Tensor:
    """Each row times 1 + its logical expert / 1000, so that an answer proves whose it is."""
    index = arrived.index.long().clamp_(min=0)
    rows = exchange.rows[index.flatten()].float()
    groups = rows.view(rows.shape[0], -1, 128)
    rows = (groups * exchange.scales[index.flatten()].unsqueeze(2)).view(rows.shape)
    factor = (1 + held.float() / 1000).repeat_interleave(index[0].numel())
    return (rows * factor.unsqueeze(1)).bfloat16()


def expected(x: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    factor = (pairs.weight * (1 + pairs.expert.float() / 1000)).sum(1, keepdim=True)
    return over_the_wire(x, Wire.FP8) * factor


def all_to_all(meter: Meter, sizes: Sizes = FULL) -> None:
    for tokens in sizes.tokens:
        _one_process(meter, sizes, tokens)


def _one_process(meter: Meter, sizes: Sizes, tokens: int) -> None:
    device = meter.device
    shape = ExchangeShape(1, sizes.ranks, 1, tokens, sizes.top_k, sizes.hidden)
    ours = own_buffer(shape.answers, device)
    theirs = [own_buffer(shape.requests, device) for _ in range(sizes.ranks)]
    peers = [Peer(f"e{i}", box, 0) for i, box in enumerate(theirs)]
    router = RouterExchange(shape, ours, peers, DEADLINE_S)
    experts = [
        ExpertExchange(shape, box, [Peer("r0", ours, i)], DEADLINE_S)
        for i, box in enumerate(theirs)
    ]
    held = [held_by(i, sizes.slots, device) for i in range(sizes.ranks)]
    x = torch.randn(tokens, sizes.hidden, device=device, dtype=torch.bfloat16)
    pairs = random_pairs(tokens, sizes, device)

    router.dispatch(0, x, pairs, 0)
    for expert, slots in zip(experts, held, strict=True):
        arrived = expert.receive(0, [0], slots)
        expert.answer(arrived, experts_output(expert, arrived, slots))
    out, missing = router.combine(0)
    if router.lost() or missing.any():
        raise ValueError(f"lanes were lost: {router.lost()}")
    check = largest_error(out, expected(x, pairs), 1e-2, "sums")
    # Timed without what computes the experts: any values do.
    some = torch.randn(arrived.index.numel(), sizes.hidden, device=device, dtype=torch.bfloat16)

    def serve() -> None:
        for expert, slots in zip(experts, held, strict=True):
            expert.answer(expert.receive(0, [0], slots), some)

    steps: dict[str, Callable[[], object]] = {
        "dispatch": lambda: router.dispatch(0, x, pairs, 0),
        "experts' side": serve,
        "combine": lambda: router.combine(0),
    }
    took = replayed(steps, sizes.rounds)
    if router.lost():
        raise ValueError(f"lanes were lost: {router.lost()}")
    messages = [
        Message(int((pairs.rank == i).any(1).sum()), int((pairs.rank == i).sum()))
        for i in range(sizes.ranks)
    ]
    moved = {
        "dispatch": sum(request_bytes(shape, message) for message in messages),
        "combine": sum(answer_bytes(shape, message) for message in messages),
    }
    for name, moved_bytes in moved.items():
        what = f"{name}, {tokens} tokens to {sizes.ranks} ranks, {took[name]:.0f} us"
        speed = moved_bytes / took[name] / 1e3
        meter.row("all-to-all", what, speed, "GB/s", reference=COPY, check=check)
        if tokens == 128 and sizes == FULL:
            published = DEEPEP_US[name]
            meter.row(
                "all-to-all",
                f"{name}: DeepEP's {published:.0f} us on 8 H800 over NVLink / ours here",
                published / took[name],
                "x",
            )
    meter.row(
        "all-to-all",
        f"arrive and answer of {sizes.ranks} ranks in turn, {tokens} tokens",
        took["experts' side"],
        "us",
    )


def replayed(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds of each step, the median over ``rounds`` of all of them in turn, each captured
    in a CUDA graph: the exchange needs nothing from the host.
    """
    graphs = {}
    for name, step in steps.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            step()
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        marks[0].record()
        for graph, mark in zip(graphs.values(), marks[1:], strict=True):
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        for name, begin, end in zip(steps, marks, marks[1:], strict=False):
            took[name].append(1000 * begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in took.items()}


# ---------------------------------------------------------------- between processes


def _child(peer: Any, layout_bytes: int, shape: ExchangeShape, slots: int, rounds: int) -> None:
    """An expert rank: exchanges what opens the inboxes over the pipe ``peer``, serves, ends."""
    device = torch.device("cuda")
    inbox, shared = create_cuda(shape.requests.total_bytes, device)
    peer.send(shared)
    router = attach_cuda(peer.recv(), layout_bytes)
    exchange = ExpertExchange(shape, inbox, [Peer("r0", router, 0)], DEADLINE_S)
    held = held_by(0, slots, device)
    for _ in range(rounds):
        arrived = exchange.receive(0, [0], held)
        exchange.answer(arrived, experts_output(exchange, arrived, held))
        torch.cuda.synchronize()
    peer.send([str(lost) for lost in exchange.lost()])
    peer.recv()  # keeps the inbox until the router is done with it


def between_processes(meter: Meter, sizes: Sizes = FULL) -> None:
    import torch.multiprocessing as processes  # noqa: PLC0415

    tokens, rounds = sizes.tokens[0], 5
    small = Sizes(sizes.hidden, sizes.top_k, 1, sizes.slots, sizes.tokens)
    shape = ExchangeShape(1, 1, 1, tokens, sizes.top_k, sizes.hidden)
    context = processes.get_context("spawn")
    ours, theirs = context.Pipe()
    inbox, shared = create_cuda(shape.answers.total_bytes, meter.device)
    child = context.Process(
        target=_child, args=(theirs, inbox.nbytes, shape, sizes.slots, rounds), daemon=True
    )
    child.start()
    if not ours.poll(60):
        raise TimeoutError("the expert rank's process did not start")
    peer = attach_cuda(ours.recv(), shape.requests.total_bytes)
    ours.send(shared)
    router = RouterExchange(shape, inbox, [Peer("e0", peer, 0)], DEADLINE_S)
    took = []
    for _ in range(rounds):
        x = torch.randn(tokens, sizes.hidden, device=meter.device, dtype=torch.bfloat16)
        pairs = random_pairs(tokens, small, meter.device)
        torch.cuda.synchronize()
        began = time.perf_counter()
        router.dispatch(0, x, pairs, 0)
        out, missing = router.combine(0)
        torch.cuda.synchronize()
        took.append(1e6 * (time.perf_counter() - began))
        if router.lost() or missing.any():
            raise ValueError("the lane was lost")
        check = largest_error(out, expected(x, pairs), 1e-2, "sums")
    if not ours.poll(60) or (lost := ours.recv()):
        raise ValueError(f"the expert rank lost its lane: {lost}")
    ours.send(None)
    child.join(30)
    what = f"round trip, {tokens} tokens, one card shared in turns"
    meter.row("all-to-all, processes", what, statistics.median(took), "us", check=check)


# ---------------------------------------------------------------- attention, rows, sampling


def _batch(
    rows: CacheRows, heads: int, count: int, queries: int, context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Queries]:
    blocks = -(-context // rows.block_size)
    width = max(rows.heads * rows.key_dim, rows.value_offset + rows.heads * rows.value_dim)
    cache = torch.randn(count * blocks * rows.block_size, width, device=device).bfloat16()
    table = torch.randperm(count * blocks, device=device).int().view(count, blocks)
    q = torch.randn(count * queries, heads, rows.key_dim, device=device) * rows.key_dim**-0.5
    begins = torch.arange(count + 1, device=device, dtype=torch.int32) * queries
    contexts = torch.full((count,), context, dtype=torch.int32, device=device)
    return q.bfloat16(), cache, Queries(begins, contexts, table, queries, context)


def attentions(meter: Meter, small: bool = False) -> None:
    latent = CacheRows(1, 576, 512, 0, 64)
    grouped = CacheRows(4, 128, 128, 512, 64)
    for name, rows, heads in (("latent", latent, 128), ("grouped", grouped, 32)):
        q, cache, queries = _batch(rows, heads, 3, 2, 150, meter.device)
        for splits in (1, 3):
            got = attend(q, cache, queries, rows, splits=splits).cpu()
            wanted = reference_attend(q.cpu(), cache.cpu(), _on_host(queries), rows)
            check = largest_error(got, wanted, 1e-2, "rows")
        cases = [("decode", 64, 1, 4096), ("prefill", 1, 2048, 4096)]
        for what, count, each, context in [] if small else cases:
            q, cache, queries = _batch(rows, heads, count, each, context, meter.device)
            took = meter.milliseconds(lambda: attend(q, cache, queries, rows))  # noqa: B023
            seen = count * each * (context - (each - 1) / 2)
            flops = 2 * heads * seen * (rows.key_dim + rows.value_dim)
            told = f"{name} {what}, {count} x {each} queries, {context} keys, {1000 * took:.0f} us"
            if each == 1:
                speed, unit, against = cache.nbytes / took / 1e6, "GB/s", COPY
            else:
                speed, unit, against = flops / took / 1e9, "TFLOP/s", "bf16 matmul"
            meter.row("attention", told, speed, unit, reference=against, check=check)


def _on_host(queries: Queries) -> Queries:
    return Queries(
        queries.begins.cpu(),
        queries.contexts.cpu(),
        queries.blocks.cpu(),
        queries.most_queries,
        queries.most_context,
    )


def norms(meter: Meter, sizes: Sizes = FULL) -> None:
    device = meter.device
    for tokens in sizes.tokens:
        x = torch.randn(tokens, sizes.hidden, device=device).bfloat16()
        residual, weight = torch.randn_like(x), torch.randn(sizes.hidden, device=device)
        wanted = reference_rms_norm(residual.float() + x.float(), weight, 1e-6)
        check = largest_error(rms_norm(x, weight, 1e-6, residual.clone()), wanted, 1e-2, "rows")
        took = meter.milliseconds(lambda: rms_norm(x, weight, 1e-6, residual))  # noqa: B023
        speed = 4 * x.nbytes / took / 1e6
        told = f"norm and residual, {tokens} tokens, {1000 * took:.0f} us"
        meter.row("rows", told, speed, "GB/s", reference=COPY, check=check)
        x = torch.randn(tokens, 1536 + 512 + 64, device=device).bfloat16()
        turn = torch.polar(torch.ones(tokens, 32), torch.rand(tokens, 32)).to(device)
        cache = torch.zeros(tokens, 576, device=device, dtype=torch.bfloat16)
        at, ones = torch.randperm(tokens, device=device), torch.ones(1536, device=device)
        rows = lambda: latent_rows(x, ones, ones[:512], 1e-6, turn, at, cache)  # noqa: B023, E731
        rows()
        wanted = reference_rms_norm(x[:, 1536:2048], ones[:512], 1e-6)
        check = largest_error(cache[at, :512], wanted, 1e-2, "latents")
        took = meter.milliseconds(rows)
        told = f"latent rows, {tokens} tokens, {1000 * took:.0f} us"
        meter.row("rows", told, 2 * x.nbytes / took / 1e6, "GB/s", reference=COPY, check=check)


def samplings(meter: Meter, vocab: int = 129280, count: int = 64) -> None:
    device = meter.device
    logits = torch.randn(count, vocab, device=device) * 3
    rules = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "top_k 50, top_p 0.9": (0.8, 50, 0.9, 0.0),
    }
    for name, (temperature, top_k, top_p, min_p) in rules.items():
        same = [[value] * count for value in (temperature, top_k, top_p, min_p)]
        draws = Draws.of(*same, range(count), range(count)).on(device)
        tokens, cuts = sample_and_cuts(logits, draws)
        could = kept(logits, cuts)
        for row in range(0, count, 9):
            wanted = reference_kept(logits[row].cpu(), temperature, top_k, top_p, min_p)
            other = int(could[row].sum()) - wanted.numel()
            if abs(other) > (0 if top_p == 1.0 else 1) or not could[row, int(tokens[row])]:
                raise ValueError(f"{name}: row {row} keeps {other} tokens too many")
        took = meter.milliseconds(lambda: sample(logits, draws))  # noqa: B023
        told = f"{name}, {count} rows of {vocab}"
        meter.row("sampling", told, 1000 * took, "us", check="kept tokens")


SECTIONS = {
    "all-to-all": all_to_all,
    "all-to-all, processes": between_processes,
    "attention": attentions,
    "rows": norms,
    "sampling": samplings,
}
