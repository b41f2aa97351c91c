from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from ep_kernels.bundle import pack_bundle

from expert_svc.loading import Fetched, PeerError, SupersededError
from expert_svc.slots import Fault, SlotError, SlotTable
from mesh.messages import SlotFault, Source
from moe_model.errors import NotFinite
from tests.support.experts import HIDDEN, INTER, LAYERS, Reads, apply, expert, new_table, source

EXPERT_BYTES = 3 * HIDDEN * INTER * 4


class Peer:
    """Another worker's table, without a link between: what it hands out, and what was asked."""

    def __init__(self, *slots: list[int]) -> None:
        self.table = new_table(Reads())
        apply(self.table, *slots)
        self.asked: list[tuple[str, int, int]] = []
        self.gone: set[str] = set()

    def __call__(
        self, wanted: Source, index: int, limit: int, superseded: threading.Event
    ) -> Fetched:
        self.asked.append((wanted.address, wanted.layer, index))
        if wanted.address in self.gone:
            raise PeerError("gone", gone=True)
        held = self.table.find(wanted.layer, wanted.peer_slot, index)
        if held is None:
            raise PeerError("not held", gone=False)
        bundle = pack_bundle(held.weights.kept(), wanted.layer, index)
        assert bundle.nbytes <= limit
        return Fetched(bundle, held.checksum, held.shadow)


def computes(table: SlotTable, layer: int, slot: int, index: int) -> bool:
    held = table.find(layer, slot, index)
    assert held is not None
    x = torch.randn(3, HIDDEN)
    gate, up, down = expert(layer, index)
    want = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    return torch.allclose(held.weights.ffn(x), want, rtol=1e-4, atol=1e-4)


def test_holds_what_it_is_told_and_reads_nothing_else() -> None:
    read = Reads()
    table = new_table(read)
    assert table.held() == ((), ())
    applied = apply(table, [2, 0], [5, -1], epoch=4)
    assert (applied.loaded, applied.from_peers, applied.faults) == (3, 0, ())
    assert applied.loaded_bytes == 3 * EXPERT_BYTES
    assert table.held() == ((2, 0), (5, -1))
    assert table.epoch == 4
    assert read.read == [(1, 2), (1, 0), (3, 5)]
    assert table.resident_bytes() == 3 * EXPERT_BYTES


def test_the_same_assignment_again_reads_nothing() -> None:
    read = Reads()
    table = new_table(read)
    apply(table, [0, 1], [2, 3])
    read.read.clear()
    assert apply(table, [0, 1], [2, 3], epoch=2).loaded == 0
    assert read.read == []
    assert table.epoch == 2


def test_a_change_loads_only_what_is_missing_and_frees_what_is_gone() -> None:
    read = Reads()
    table = new_table(read)
    apply(table, [0, 1], [2, 3])
    read.read.clear()
    assert apply(table, [0, 4], [-1, 3]).loaded == 1
    assert read.read == [(1, 4)]
    assert table.held() == ((0, 4), (-1, 3))
    assert table.resident_bytes() == 3 * EXPERT_BYTES


def test_slots_come_and_go_while_those_that_stay_serve() -> None:
    read = Reads()
    table = new_table(read)
    apply(table, [0], [1])
    bank, kept = table.banks[1], table.find(1, 0, 0)
    seen: list[tuple[int, ...]] = []
    apply(table, [0, 2, 3], [1], progress=lambda _share: seen.append(table.held()[0]))
    assert seen == [(0, -1, -1), (0, 2, -1), (0, 2, 3)]
    apply(table, [0], [1])
    assert table.held() == ((0,), (1,))
    assert table.banks[1] is bank
    assert table.find(1, 0, 0) is kept
    assert read.read == [(1, 0), (3, 1), (1, 2), (1, 3)]
    assert table.resident_bytes() == 2 * EXPERT_BYTES


def test_an_expert_that_another_slot_holds_moves_without_being_read_or_kept_twice() -> None:
    read = Reads()
    table = new_table(read)
    apply(table, [0, 1], [2])
    read.read.clear()
    assert apply(table, [1, 0, 1], [2]).loaded == 0
    assert table.held() == ((1, 0, 1), (2,))
    assert all(computes(table, 1, slot, index) for slot, index in enumerate([1, 0, 1]))
    assert table.resident_bytes() == 3 * EXPERT_BYTES
    # Another layer's expert of the same number is another expert; one wanted twice is read once.
    assert apply(table, [1], [0, 0]).loaded == 1
    assert read.read == [(3, 0)]


def test_an_expert_comes_from_a_peer_that_holds_it() -> None:
    read, peer = Reads(), Peer([4, 2], [0])
    table = new_table(read, fetch=peer)
    sources = [source(1, 1, "a", 1), source(3, 0, "a", 0), source(1, 0, "a", 9)]
    applied = apply(table, [5, 2], [0], sources=sources)
    assert (applied.loaded, applied.from_peers, applied.faults) == (3, 2, ())
    assert read.read == [(1, 5)], "what the peer does not hold is read"
    assert all(computes(table, 1, slot, index) for slot, index in enumerate([5, 2]))
    assert computes(table, 3, 0, 0)
    assert dict(table.tally.loaded) == {"peer": 2, "checkpoint": 1}
    assert dict(table.tally.faults) == {"peer": 1}
    theirs, ours = peer.table.find(1, 1, 2), table.find(1, 1, 2)
    assert theirs is not None
    assert ours is not None
    assert ours.checksum == theirs.checksum
    assert torch.equal(ours.shadow, theirs.shadow)


def test_sources_are_asked_in_order_and_one_that_is_gone_only_once() -> None:
    read, peer = Reads(), Peer([4, 2], [0, 1])
    peer.gone.add("dead")
    table = new_table(read, fetch=peer)
    sources = [
        source(layer, slot, address, slot)
        for layer in LAYERS
        for slot in (0, 1)
        for address in ("dead", "live")
    ]
    assert apply(table, [4, 2], [0, 1], sources=sources).from_peers == 4
    assert [address for address, *_ in peer.asked] == ["dead", *["live"] * 4]
    assert read.read == []
    apply(table, [], [], sources=sources)
    apply(table, [4], [], sources=sources)
    assert peer.asked[-2:] == [("dead", 1, 4), ("live", 1, 4)], "the next assignment asks again"


def test_a_slot_that_fails_stays_empty_and_the_others_go_on() -> None:
    read = Reads()
    read.broken = {
        (1, 2): NotFinite(Path("model.safetensors"), "experts.2.up"),
        (3, 1): OSError("input/output error"),
        (3, 3): MemoryError(),
    }
    told: list[Fault] = []
    table = new_table(read)
    applied = apply(table, [2, 0], [1, 3, 4], epoch=6, on_fault=told.append)
    assert table.held() == ((-1, 0), (-1, -1, 4))
    assert applied.loaded == 2
    assert applied.faults == (
        SlotFault(1, 0, 2, "model.safetensors: tensor experts.2.up holds NaN or infinite values"),
        SlotFault(3, 0, 1, "input/output error"),
        SlotFault(3, 1, 3, "out of memory"),
    )
    assert [fault.kind for fault in told] == ["unreadable", "unreadable", "memory"]
    assert table.epoch == 6
    read.broken.clear()
    assert apply(table, [2, 0], [1, 3, 4]).loaded == 3, "what failed is tried again"


def test_an_expert_that_computes_something_else_than_its_checkpoint_never_serves() -> None:
    class Miscomputes(Reads):
        """Gives each tensor right when it is kept and another when it is compared."""

        def __call__(self, layer: int, index: int) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            tensors = super().__call__(layer, index)
            table.banks[layer].keep = lambda gate, up, down: keep[layer](up, gate, down)  # type: ignore[method-assign]
            return tensors

    read = Miscomputes()
    table = new_table(read)
    apply(table, [-1], [-1])
    keep = {layer: bank.keep for layer, bank in table.banks.items()}
    applied = apply(table, [2], [-1])
    assert table.held() == ((-1,), (-1,))
    assert "shadow token" in applied.faults[0].reason
    assert dict(table.tally.faults) == {"shadow": 1}


def test_a_bug_is_no_fault() -> None:
    read = Reads()
    read.broken[1, 2] = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        apply(new_table(read), [2], [])


def test_progress_rises_to_one_and_counts_what_is_there_already() -> None:
    table = new_table(Reads())
    shares: list[float] = []
    apply(table, [0, 1], [2, -1], progress=shares.append)
    assert shares == [0.0, 1 / 3, 2 / 3, 1.0]
    shares.clear()
    apply(table, [0, 1], [2, 3], progress=shares.append)
    assert shares == [0.75, 1.0]


def test_nothing_to_hold_is_done_at_once() -> None:
    table = new_table(Reads())
    assert apply(table, [], []).loaded == 0
    assert table.held() == ((), ())


def test_a_newer_assignment_stops_an_older_one_and_keeps_what_was_loaded() -> None:
    table = new_table(Reads())
    superseded = threading.Event()

    def progress(share: float) -> None:
        if share:
            superseded.set()

    with pytest.raises(SupersededError):
        apply(table, [0, 1], [2, 3], progress=progress, superseded=superseded)
    assert table.held() == ((0, -1), (-1, -1))
    assert table.epoch == 0
    assert apply(table, [0, 1], [2, 3]).loaded == 3


class Watched(threading.Event):
    """Records how long it was waited for and is set the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return len(self.waits) > 1


def test_the_pace_is_kept_between_experts_and_ends_with_a_newer_assignment() -> None:
    table, superseded = new_table(Reads()), Watched()
    with pytest.raises(SupersededError):
        apply(table, [0, 1], [], superseded=superseded, bytes_per_s=1)
    assert superseded.waits[0] == 0
    assert superseded.waits[1] == pytest.approx(EXPERT_BYTES, rel=0.02), "a second for each byte"
    assert table.held() == ((0, -1), ())


def test_what_is_no_longer_right_is_emptied_and_loaded_again() -> None:
    read = Reads()
    table = new_table(read)
    apply(table, [0, 1, 0], [0])
    held, other = table.find(1, 2, 0), table.find(3, 0, 0)
    assert held is not None
    assert other is not None
    table.discard(1, 0, other)
    assert table.held() == ((0, 1, 0), (0,)), "what has been replaced meanwhile is left alone"
    table.discard(1, 0, held)
    assert table.held() == ((-1, 1, -1), (0,))
    assert table.find(1, 2, 0) is None
    assert apply(table, [0, 1, 0], [0]).loaded == 1
    assert table.held() == ((0, 1, 0), (0,))


def test_only_what_a_slot_holds_is_found() -> None:
    table = new_table(Reads())
    assert table.find(1, 0, 0) is None
    apply(table, [0, -1], [1])
    assert table.find(1, 0, 0) is not None
    for layer, slot, index in ((1, 0, 1), (1, 1, -1), (1, 2, 0), (1, -2, 0), (3, 0, 0), (9, 0, 0)):
        assert table.find(layer, slot, index) is None


@pytest.mark.parametrize(
    ("layers", "slots", "text"),
    [
        ((1, 2), ((0,), (1,)), "MoE layers"),
        ((1, 3), ((0,),), "MoE layers"),
        ((1, 3), ((0,), (6,)), "experts \\[6\\] in layer 3"),
        ((1, 3), ((-2,), (0,)), "experts \\[-2\\] in layer 1"),
        ((1, 3), ((0, 1, 2), (0,)), "3 slots in layer 1, this worker offers 2"),
    ],
)
def test_what_the_model_lacks_is_refused_before_anything_changes(
    layers: tuple[int, ...], slots: tuple[tuple[int, ...], ...], text: str
) -> None:
    table = new_table(Reads(), max_slots=2)
    apply(table, [4, 5], [4, 5])
    with pytest.raises(SlotError, match=text):
        table.apply(layers, slots, 2, superseded=threading.Event())
    assert table.held() == ((4, 5), (4, 5))


def test_a_slot_is_never_changed_while_its_bank_is_in_use() -> None:
    table = new_table(Reads())
    apply(table, [0], [1])
    with table.lock:
        loader = threading.Thread(target=apply, args=(table, [2], [1]))
        loader.start()
        loader.join(0.05)
        assert loader.is_alive()
        assert table.banks[1].holds.tolist() == [0]
    loader.join(10)
    assert table.held() == ((2,), (1,))
