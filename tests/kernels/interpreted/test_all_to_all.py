"""Both ends of an exchange in one process: values, edge cases, losses and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ep_kernels.plane import AnswerStatus, LaneLost, PlaneError
from ep_kernels.triton.all_to_all.end import ExchangeShape, LaneTimedOut
from ep_kernels.triton.all_to_all.exchange import ExpertExchange, RouterExchange
from ep_kernels.triton.all_to_all.inbox import Header, Wire, lay_out
from ep_kernels.triton.all_to_all.plan import Pairs
from ep_kernels.triton.all_to_all.reference import exchanged
from ep_kernels.triton.all_to_all.stream import Batch
from ep_kernels.triton.arguments import KernelArgumentError
from exchange_peer import held_by, random_pairs, run_expert, serve
from exchange_world import SHAPE, World, buffer


def wanted(x: torch.Tensor, pairs: Pairs, shape: ExchangeShape) -> torch.Tensor:
    return exchanged(
        x,
        pairs.rank,
        pairs.expert,
        pairs.weight,
        run_expert,
        shape.wire,
        shape.back,
        exact=shape.exact,
    )


def assert_same(out: torch.Tensor, expected: torch.Tensor, shape: ExchangeShape) -> None:
    rtol = 1e-2 if shape.back is Wire.BF16 else 1e-6  # a sum may round the other way
    torch.testing.assert_close(out, expected, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(
    ("wire", "back", "exact", "hidden"),
    [
        (Wire.FP32, Wire.FP32, True, 20),
        (Wire.BF16, Wire.BF16, False, 24),
        (Wire.FP8, Wire.BF16, False, 384),
        (Wire.FP8, Wire.FP32, True, 128),
    ],
    ids=str,
)
def test_two_rounds_of_every_size(
    wire: Wire, back: Wire, exact: bool, hidden: int, rng: torch.Generator
) -> None:
    """No tokens, one, and as many as fit; the second round reuses the ring slot."""
    shape = replace(SHAPE, wire=wire, back=back, exact=exact, hidden=hidden, routers=3)
    world = World(shape)
    routers = [world.router(i) for i in range(3)]
    experts = [world.expert(i) for i in range(2)]
    for sizes in ((0, 1, 9), (9, 0, 4)):
        sent = []
        for router, tokens in zip(routers, sizes, strict=True):
            x = torch.randn(tokens, hidden, generator=rng) * 30
            pairs = random_pairs(tokens, 2, 2, rng)
            router.dispatch(1, x, pairs, layer=3)
            sent.append((x, pairs))
        for index, expert in enumerate(experts):
            assert expert.posted(1) == [0, 1, 2]
            assert expert.posted(0) == []
            serve(expert, 1, [2, 0, 1], held_by(index))
            assert expert.posted(1) == []
        for router, (x, pairs) in zip(routers, sent, strict=True):
            out, missing = router.combine(1)
            assert_same(out, wanted(x, pairs, shape), shape)
            assert missing.tolist() == [0] * x.shape[0]
            assert router.answered[1].tolist() == [AnswerStatus.OK] * 2
            assert router.lost() == []


def test_exact_rows_do_not_depend_on_the_batch_or_the_placement(rng: torch.Generator) -> None:
    shape = replace(SHAPE, exact=True)
    x = torch.randn(9, 20, generator=rng)
    pairs = random_pairs(9, 2, 2, rng, dropped=0.0)
    moved = Pairs(1 - pairs.rank, pairs.slot, pairs.expert, pairs.weight)
    alone = Pairs(*(part[4:5] for part in (pairs.rank, pairs.slot, pairs.expert, pairs.weight)))
    outs = []
    for rows, placed, swapped in ((x, pairs, 0), (x, moved, 1), (x[4:5], alone, 0)):
        world = World(shape)
        router = world.router(0)
        router.dispatch(0, rows, placed, 0)
        for index in range(2):
            serve(world.expert(index), 0, [0], held_by(index ^ swapped))
        outs.append(router.combine(0)[0])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0][4:5], outs[2])


def test_all_tokens_to_one_expert_and_none_to_the_others(rng: torch.Generator) -> None:
    world = World(SHAPE)
    router = world.router(1)
    x = torch.randn(9, 20, generator=rng)
    ones = torch.ones(9, 2, dtype=torch.int32)
    rank = torch.stack([ones[:, 0], -ones[:, 0]], 1).contiguous()
    pairs = Pairs(rank, ones.clone(), 3 * ones, torch.rand(9, 2, generator=rng))
    router.dispatch(0, x, pairs, 0)
    full, empty = world.expert(1), world.expert(0)
    arrived = full.receive(0, [1], held_by(1))
    assert arrived.count.tolist() == [[0], [9]]
    assert arrived.info[0].tolist() == [9, 9, 0, 0]
    full.answer(arrived, torch.ones(arrived.index.numel(), 20))
    serve(empty, 0, [1], held_by(0))
    out, missing = router.combine(0)
    torch.testing.assert_close(out, pairs.weight[:, :1].expand(9, 20))
    assert not missing.any()


def test_a_message_says_what_it_is(rng: torch.Generator) -> None:
    world = World(SHAPE)
    router, expert = world.router(0), world.expert(1)
    router.set_stamp(step=41, epoch=7)
    router.dispatch(0, torch.randn(4, 20, generator=rng), random_pairs(4, 2, 2, rng), layer=5)
    header = expert.header(0, 0)
    assert (header[Header.STEP], header[Header.LAYER], header[Header.EPOCH]) == (41, 5, 7)
    assert header[Header.FLAG] == 7 << 32 | 1
    assert header[Header.ROWS] == header[Header.TOTAL_ROWS]


def test_a_stale_slot_is_answered_stale_and_its_tokens_are_missing(rng: torch.Generator) -> None:
    world = World(SHAPE)
    router = world.router(0)
    for change in ("expert", "slot"):
        x = torch.randn(6, 20, generator=rng)
        pairs = random_pairs(6, 2, 2, rng, dropped=0.0)
        for part, values in ((pairs.rank, [0, 1]), (pairs.slot, [0, 0]), (pairs.expert, [0, 2])):
            part[2] = torch.tensor(values, dtype=torch.int32)
        getattr(pairs, change)[2, 0] = 99
        router.dispatch(0, x, pairs, 0)
        for index in range(2):
            serve(world_expert(world, index), 0, [0], held_by(index))
        out, missing = router.combine(0)
        assert router.answered[0].tolist() == [AnswerStatus.STALE, AnswerStatus.OK]
        assert missing.tolist() == (pairs.rank == 0).any(1).int().tolist()
        cut = replace(pairs, rank=torch.where(pairs.rank == 0, -1, pairs.rank))
        assert_same(out, wanted(x, cut, SHAPE), SHAPE)


def world_expert(world: World, index: int) -> ExpertExchange:
    """The same end each time: it remembers what it has seen."""
    kept = world.__dict__.setdefault("kept", {})
    if index not in kept:
        kept[index] = world.expert(index)
    expert: ExpertExchange = kept[index]
    return expert


def test_a_silent_peer_times_out_and_the_lane_stays_closed(rng: torch.Generator) -> None:
    world = World(SHAPE, deadline_s=0.05)
    router, expert = world.router(0), world.expert(1)
    for attempt in range(2):
        x = torch.randn(5, 20, generator=rng)
        pairs = random_pairs(5, 2, 2, rng)
        router.dispatch(0, x, pairs, 0)
        serve(expert, 0, [0], held_by(1))
        out, missing = router.combine(0)
        cut = replace(pairs, rank=torch.where(pairs.rank == 0, -1, pairs.rank))
        assert_same(out, wanted(x, cut, SHAPE), SHAPE)
        assert missing.tolist() == (pairs.rank == 0).any(1).int().tolist()
        lost = router.lost()
        if attempt == 0:
            assert [(type(loss), loss.peer) for loss in lost] == [(LaneTimedOut, "expert0")]
            assert "no flag came within 0.05 s" in str(lost[0])
        else:
            assert lost == []
    assert router.open_lanes() == [1]


def test_the_host_can_give_a_lane_up_before_the_deadline(rng: torch.Generator) -> None:
    world = World(SHAPE, deadline_s=1e6)
    router = world.router(0)
    router.dispatch(0, torch.randn(3, 20, generator=rng), random_pairs(3, 2, 2, rng), 0)
    serve(world.expert(1), 0, [0], held_by(1))
    router.give_up(0)
    router.combine(0)
    [lost] = router.lost()
    assert type(lost) is LaneLost
    assert (lost.peer, lost.reason) == ("expert0", "the host gave it up")


def test_a_ring_slot_is_not_overwritten_before_it_was_read(rng: torch.Generator) -> None:
    """An answer that never was (the host skipped it) closes the lane rather than lap the peer."""
    world = World(SHAPE, deadline_s=0.05)
    router, expert = world.router(0), world.expert(0)
    x = torch.randn(9, 20, generator=rng)
    router.dispatch(0, x, random_pairs(9, 2, 2, rng), 0)
    before = expert.inbox.bytes[expert.layout.headers :].clone()
    router._pairs[0] = None
    router.dispatch(0, -x, random_pairs(9, 2, 2, rng), 0)
    assert torch.equal(expert.inbox.bytes[expert.layout.headers :], before)
    assert [type(lost) for lost in router.lost()] == [LaneTimedOut] * 2


@pytest.mark.parametrize("word", [Header.FLAG, Header.ROWS, Header.PAIRS])
def test_a_corrupt_header_closes_its_lane_only(word: Header, rng: torch.Generator) -> None:
    world = World(SHAPE)
    expert = world.expert(0)
    for index in range(2):
        router = world.router(index)
        router.dispatch(0, torch.randn(4, 20, generator=rng), random_pairs(4, 2, 2, rng), 0)
    words = expert.inbox.view(expert.layout.headers, torch.int64, 4, 16)
    words[expert.layout.message(1, 0), word] = 1000
    serve(expert, 0, [0, 1], held_by(0))
    [lost] = expert.lost()
    assert lost.peer == "router1"
    assert "nonsense" in str(lost)
    assert expert.open_lanes() == [0]


def test_a_pair_beyond_its_message_is_not_followed(rng: torch.Generator) -> None:
    world = World(SHAPE)
    router, expert = world.router(0), world.expert(0)
    pairs = random_pairs(4, 2, 2, rng, dropped=0.0)
    pairs.rank.fill_(0)
    router.dispatch(0, torch.randn(4, 20, generator=rng), pairs, 0)
    rows = expert.inbox.view(expert.layout.pairs, torch.int32, 8)
    rows[3] = 1 << 28
    rows[5] = -1
    serve(expert, 0, [0], held_by(0))
    serve(world.expert(1), 0, [0], held_by(1))
    _, missing = router.combine(0)
    assert missing.tolist() == [1] * 4


def test_what_cannot_be_is_refused_and_named(rng: torch.Generator) -> None:
    world = World(SHAPE)
    router = world.router(0)
    pairs = random_pairs(3, 2, 2, rng)
    x = torch.randn(3, 20, generator=rng)
    with pytest.raises(KernelArgumentError, match="slot is 2, expected a ring slot of 0 to 1"):
        router.dispatch(2, x, pairs, 0)
    with pytest.raises(KernelArgumentError, match="x is 10 tokens, expected at most 9"):
        router.dispatch(0, torch.zeros(10, 20), pairs, 0)
    with pytest.raises(KernelArgumentError, match=r"rank is of shape \[3, 2\], expected \[4, 2\]"):
        router.dispatch(0, torch.zeros(4, 20), pairs, 0)
    with pytest.raises(KernelArgumentError, match=r"weight is torch\.float64"):
        router.dispatch(0, x, replace(pairs, weight=pairs.weight.double()), 0)
    with pytest.raises(PlaneError, match="ring slot 0 has no batch to combine"):
        router.combine(0)
    router.dispatch(0, x, pairs, 0)
    with pytest.raises(PlaneError, match="ring slot 0 has a batch that was not combined"):
        router.dispatch(0, x, pairs, 0)
    with pytest.raises(PlaneError, match="divisible by 128: 20"):
        lay_out(replace(SHAPE.requests.shape, wire=Wire.FP8))
    with pytest.raises(PlaneError, match="sums"):
        replace(SHAPE, back=Wire.FP8)
    with pytest.raises(PlaneError, match=r"an inbox needs \d+ bytes, got 64"):
        RouterExchange(SHAPE, buffer(64, 64), [], 1.0)
    with pytest.raises(PlaneError, match="expected 2 peers, got 0"):
        RouterExchange(SHAPE, world.inboxes["router"][0], [], 1.0)


# ------------------------------------------------------------------ streams


def grouped(batch: Batch, wire: Wire) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts' output with its rows by slot, and where each pair's row is."""
    rows = batch.rows.float()
    if wire is Wire.FP8:
        groups = rows.view(rows.shape[0], rows.shape[1] // 128, 128)
        rows = (groups * batch.scales.unsqueeze(2)).view(rows.shape)
    order = torch.argsort(batch.pair_slot, stable=True)
    home = torch.empty(order.shape, dtype=torch.int32)
    home[order] = torch.arange(order.numel(), dtype=torch.int32)
    y = rows[batch.pair_row[order].long()] * (1 + batch.pair_expert[order]).unsqueeze(1)
    return y, home


class Running:
    """Expert ranks that serve whenever their router's loop pauses: one thread, no waiting."""

    def __init__(self, world: World, max_tokens: int) -> None:
        self.experts = [world.expert_stream(i, max_tokens) for i in range(world.shape.experts)]
        self.wire = world.shape.wire
        self.stale = False
        self.silent: set[int] = set()

    def pause(self, _: float) -> None:
        for index, expert in enumerate(self.experts):
            if index in self.silent:
                continue
            for batch in expert.poll():
                if self.stale and index == 0:
                    expert.refuse(batch)
                else:
                    expert.answer(batch, *grouped(batch, self.wire))


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch):
    def start(world: World, max_tokens: int) -> Running:
        running = Running(world, max_tokens)
        monkeypatch.setattr("ep_kernels.triton.all_to_all.stream.time.sleep", running.pause)
        return running

    return start


@pytest.mark.parametrize(
    ("wire", "back", "exact", "hidden"),
    [
        (Wire.FP32, Wire.FP32, True, 20),
        (Wire.FP8, Wire.BF16, False, 128),
    ],
    ids=str,
)
def test_a_batch_beyond_the_capacity_goes_in_chunks(
    wire: Wire, back: Wire, exact: bool, hidden: int, rng: torch.Generator, running
) -> None:
    """Up to five chunks a lane through two ring slots, both ways; several batches in turn."""
    shape = replace(SHAPE, wire=wire, back=back, exact=exact, hidden=hidden)
    world = World(shape)
    router = world.router_stream(1, 45)
    running(world, 45)
    for tokens in (0, 40, 1, 9, 23):
        x = torch.randn(tokens, hidden, generator=rng) * 10
        pairs = random_pairs(tokens, 2, 2, rng)
        router.set_stamp(tokens, 2)
        out, missing = router.exchange(x, pairs, 3)
        assert_same(out, wanted(x, pairs, shape), shape)
        assert not missing.any()
        assert router.lost() == []
        assert not router.sending()


def test_a_stream_allocates_exactly_what_came(rng: torch.Generator) -> None:
    world = World(SHAPE)
    router, expert = world.router_stream(0, 30), world.expert_stream(1, 30)
    pairs = random_pairs(30, 2, 2, rng)
    got: list[Batch] = []

    def look(*_: object) -> dict[int, Batch]:
        while not got:
            router.move()
            got.extend(expert.poll())
        return {}

    router._collect = look  # the answers are not what this is about
    router.exchange(torch.randn(30, 20, generator=rng), pairs, 4)
    [batch] = got
    mine = pairs.rank == 1
    assert batch.rows.shape == (int(mine.any(1).sum()), 20)
    assert batch.pair_row.shape == (int(mine.sum()),)
    assert batch.pair_expert.tolist() == pairs.expert[mine].tolist()
    assert torch.equal(batch.pair_weight, pairs.weight[mine])
    assert (batch.peer, batch.layer) == ("router0", 4)
    per_row = torch.bincount(batch.pair_row, minlength=batch.rows.shape[0])
    assert batch.begins.diff().tolist() == per_row.tolist()


def test_a_stale_batch_is_refused_whole(rng: torch.Generator, running) -> None:
    world = World(SHAPE)
    router = world.router_stream(0, 30)
    running(world, 30).stale = True
    x, pairs = torch.randn(25, 20, generator=rng), random_pairs(25, 2, 2, rng)
    out, missing = router.exchange(x, pairs, 0)
    cut = replace(pairs, rank=torch.where(pairs.rank == 0, -1, pairs.rank))
    assert_same(out, wanted(x, cut, SHAPE), SHAPE)
    assert missing.tolist() == (pairs.rank == 0).any(1).int().tolist()
    assert router.lost() == []


def test_a_silent_expert_rank_costs_a_stream_its_lane_only(rng: torch.Generator, running) -> None:
    world = World(SHAPE, deadline_s=1.0)
    router = world.router_stream(0, 30)
    running(world, 30).silent.add(1)
    for attempt in range(2):
        x, pairs = torch.randn(25, 20, generator=rng), random_pairs(25, 2, 2, rng)
        out, missing = router.exchange(x, pairs, 0)
        cut = replace(pairs, rank=torch.where(pairs.rank == 1, -1, pairs.rank))
        assert_same(out, wanted(x, cut, SHAPE), SHAPE)
        assert missing.tolist() == (pairs.rank == 1).any(1).int().tolist()
        assert [type(lost) for lost in router.lost()] == [LaneTimedOut] * (attempt == 0)


def test_a_router_that_falls_silent_in_mid_batch_is_let_go(rng: torch.Generator) -> None:
    world = World(SHAPE, deadline_s=0.05)
    router, expert = world.router_stream(0, 60), world.expert_stream(0, 60)
    router._collect = lambda: router.move() and {}
    pairs = random_pairs(60, 2, 2, rng)
    router.exchange(torch.randn(60, 20, generator=rng), pairs, 0)
    lost: list[LaneLost] = []
    while not lost:
        assert expert.poll() == []
        lost = expert.lost()
    assert [(type(loss), loss.peer) for loss in lost] == [(LaneTimedOut, "router0")]
    assert expert._incoming == {}


def test_a_peer_cannot_make_a_stream_allocate_more_than_agreed(rng: torch.Generator) -> None:
    world = World(SHAPE)
    router, expert = world.router_stream(0, 60), world.expert_stream(0, 20)
    router._collect = lambda: router.move() and {}
    pairs = random_pairs(60, 2, 2, rng, dropped=0.0)
    pairs.rank.fill_(0)
    router.exchange(torch.randn(60, 20, generator=rng), pairs, 0)
    assert expert.poll() == []
    assert "nonsense" in str(expert.lost()[0])
    with pytest.raises(KernelArgumentError, match="x is 61 tokens, expected at most 60"):
        router.exchange(torch.zeros(61, 20), random_pairs(61, 2, 2, rng), 0)
