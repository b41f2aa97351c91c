"""Experts on a device, with the interpreter for one: what they keep, compute and refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from ep_kernels.bank import SlotEmptyError
from ep_kernels.bundle import checksum, checksum_of, open_bundle, pack_bundle
from ep_kernels.grouped_ffn import ExpertBank, reference_sum
from ep_kernels.shadow import checkpoint_row, shadow_fault, shadow_row
from ep_kernels.triton.bank import DeviceBank
from ep_kernels.triton.device import Device, open_device
from ep_kernels.triton.flights import DEPTH, Flights
from ep_kernels.triton.grouped_gemm import ApartWeights, SlotWeights, expert_ffn

HIDDEN, INTER, TOP_K = 48, 24, 3

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


def new_bank(device: Device, slots: int) -> DeviceBank:
    return DeviceBank(slots, HIDDEN, INTER, top_k=TOP_K, device=device, loading=device.stream())


def drawn(rng: torch.Generator) -> Tensors:
    gate, up = torch.randn(2, INTER, HIDDEN, generator=rng) * HIDDEN**-0.5
    return gate, up, torch.randn(HIDDEN, INTER, generator=rng) * INTER**-0.5


def filled(device: Device, rng: torch.Generator, slots: int) -> tuple[DeviceBank, list[Tensors]]:
    bank, experts = new_bank(device, slots), [drawn(rng) for _ in range(slots)]
    for slot, tensors in enumerate(experts):
        bank.install(slot, slot + 7, bank.pack(bank.keep(*tensors)))
    return bank, experts


def run(
    flights: Flights, bank: DeviceBank, xs: list[torch.Tensor], token: list[int], slot: list[int]
) -> tuple[torch.Tensor, np.ndarray]:
    weight = np.random.default_rng(len(token)).random(len(token), dtype=np.float32)
    flight = flights.begin(bank, xs, np.int32(token), np.int32(slot), weight)
    flights.wait(flight)
    rows = flight.rows.clone()
    flights.end(flight)
    return rows, weight


def assert_right(
    rows: torch.Tensor,
    x: torch.Tensor,
    experts: list[Tensors],
    token: list[int],
    slot: list[int],
    weight: np.ndarray,
) -> None:
    wanted = reference_sum(x, np.int32(token), experts, np.int32(slot), weight)
    assert rows.shape == wanted.shape
    size = float(wanted.abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(rows, wanted, rtol=0, atol=2**-6 * size)


@pytest.mark.parametrize("tokens", [1, 33], ids=["decode", "prefill"])
def test_experts_that_lie_apart_give_the_bits_of_those_together(
    tokens: int, device: Device, rng: torch.Generator
) -> None:
    bank, _ = filled(device, rng, 3)
    held = [expert for expert in bank.experts if expert is not None]
    together = SlotWeights(
        torch.stack([expert.gate_up for expert in held]),
        torch.stack([expert.down for expert in held]),
    )
    addresses = torch.from_numpy(bank.addresses)
    x = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()
    slots = torch.randint(-1, 3, (tokens, TOP_K), generator=rng).int()
    weights = torch.rand(tokens, TOP_K, generator=rng)
    apart = ApartWeights(addresses[0], addresses[1], HIDDEN, INTER)
    assert torch.equal(
        expert_ffn(x, slots, weights, apart), expert_ffn(x, slots, weights, together)
    )


def test_what_is_kept_travels_and_computes_the_same(device: Device, rng: torch.Generator) -> None:
    ours, theirs, tensors = new_bank(device, 1), new_bank(device, 1), drawn(rng)
    kept = ours.keep(*tensors)
    first = ours.pack(kept)
    bundle = pack_bundle(first.kept(), 2, 5)
    assert checksum(bundle) == checksum_of(kept, 2, 5)
    second = theirs.pack(open_bundle(bundle, 2, 5))
    bundle.fill_(0)  # its memory is given away, not referred to
    assert checksum_of(second.kept(), 2, 5) == checksum_of(kept, 2, 5)
    rows = [shadow_row(weights, 2, 5, HIDDEN) for weights in (first, second)]
    assert shadow_fault(*rows, exact=True) == ""
    assert shadow_fault(rows[0], checkpoint_row(tensors, 2, 5), rounded=ours.narrow) == ""
    other = checkpoint_row(drawn(rng), 2, 5)
    assert shadow_fault(rows[0], other, rounded=ours.narrow)


def test_cpu_and_device_do_not_take_each_others_experts(
    device: Device, rng: torch.Generator
) -> None:
    here = new_bank(device, 1)
    large = ExpertBank(1, 512, 512)
    small = ExpertBank(1, HIDDEN, INTER)
    wide = torch.randn(512, 512, generator=rng)
    for bank, tensors in ((small, drawn(rng)), (large, (wide, wide, wide))):
        with pytest.raises(ValueError, match="keeps BF16"):
            here.pack(bank.keep(*tensors))
        with pytest.raises(ValueError, match="packed for a CPU"):
            here.install(0, 1, bank.prepare(*tensors))
        kept = DeviceBank(
            1, bank.hidden, bank.intermediate, top_k=1, device=device, loading=device.stream()
        ).keep(*tensors)
        with pytest.raises(ValueError, match=r"layout|kept for a GPU"):
            bank.pack(kept)
        with pytest.raises(ValueError, match="another layout"):
            bank.install(0, 1, here.pack(here.keep(*drawn(rng))))
    assert here.holds.tolist() == [-1]


def test_a_bank_refuses_matrices_of_another_size(device: Device, rng: torch.Generator) -> None:
    bank = new_bank(device, 1)
    gate, up, down = drawn(rng)
    with pytest.raises(ValueError, match="up has shape"):
        bank.keep(gate, up[:-1], down)
    other = DeviceBank(1, INTER, HIDDEN, top_k=1, device=device, loading=device.stream())
    with pytest.raises(ValueError, match="expected"):
        bank.pack(other.keep(down, down, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_batch_of_several_senders_is_the_reference(
    dtype: torch.dtype, device: Device, rng: torch.Generator
) -> None:
    bank, experts = filled(device, rng, 4)
    x = torch.randn(6, HIDDEN, generator=rng).to(dtype)
    # Out of order; token 2 has more pairs than top_k, one of them twice; token 4 has none.
    token, slot = [5, 0, 2, 2, 1, 2, 2, 3, 0], [1, 3, 0, 1, 2, 3, 3, 0, 0]
    rows, weight = run(Flights(device), bank, [x[:1], x[1:1], x[1:]], token, slot)
    assert_right(rows, x, experts, token, slot, weight)
    assert (rows[4] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_the_device_give_the_same_bits_and_do_not_pass_the_host(
    dtype: torch.dtype, device: Device, rng: torch.Generator
) -> None:
    bank, _ = filled(device, rng, 4)
    flights = Flights(device)
    x = torch.randn(6, HIDDEN, generator=rng).to(dtype)
    xs, token, slot = [x[:1], x[1:1], x[1:]], [5, 0, 2, 2, 1, 3, 0], [1, 3, 0, 1, 2, 0, 0]
    wanted, weight = run(flights, bank, xs, token, slot)
    outs = [torch.full((piece.shape[0], HIDDEN), torch.nan) for piece in xs]
    before = replace(device.copied)
    flight = flights.begin(bank, xs, np.int32(token), np.int32(slot), weight, outs)
    flights.wait(flight)
    flights.end(flight)
    assert torch.equal(torch.cat(outs), wanted)
    assert device.copied.down == before.down
    # The slots' addresses, and of each token slots and weights.
    assert device.copied.up - before.up == 3 * 256


def test_batches_without_tokens_or_pairs(device: Device, rng: torch.Generator) -> None:
    bank, _ = filled(device, rng, 2)
    flights = Flights(device)
    rows, _ = run(flights, bank, [torch.empty(0, HIDDEN)], [], [])
    assert rows.shape == (0, HIDDEN)
    rows, _ = run(flights, bank, [torch.randn(3, HIDDEN, generator=rng)], [], [])
    assert (rows == 0).all()
    assert rows.shape == (3, HIDDEN)


def test_flights_share_nothing_and_outlive_changes_of_the_slots(
    device: Device, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ep_kernels.triton.flights._LEAST_BYTES", 64)
    bank, experts = filled(device, rng, 2)
    flights = Flights(device)
    for tokens in (2, 9, 3):  # memory grows, and is used again
        x = [torch.randn(tokens, HIDDEN, generator=rng) for _ in range(DEPTH)]
        token = list(range(tokens))
        slot = [t % 2 for t in token]
        weight = np.ones(tokens, dtype=np.float32)
        begun = [flights.begin(bank, [part], np.int32(token), np.int32(slot), weight) for part in x]
        assert not flights.has_room
        kept = bank.experts[0]
        assert kept is not None
        bank.clear(0)
        bank.resize(1)
        for part, flight in zip(x, begun, strict=True):
            flights.wait(flight)
            assert_right(flight.rows, part, experts, token, slot, weight)
            flights.end(flight)
        assert flights.has_room
        bank.resize(2)
        bank.install(0, 7, kept)
        bank.install(1, 8, bank.pack(bank.keep(*experts[1])))


def test_a_pair_of_an_empty_slot_is_refused_and_costs_no_flight(
    device: Device, rng: torch.Generator
) -> None:
    bank, _ = filled(device, rng, 2)
    bank.clear(1)
    flights = Flights(device)
    for _ in range(2 * DEPTH):
        with pytest.raises(SlotEmptyError) as refused:
            run(flights, bank, [torch.ones(1, HIDDEN)], [0, 0], [0, 1])
        assert refused.value.slot == 1
    assert flights.has_room
