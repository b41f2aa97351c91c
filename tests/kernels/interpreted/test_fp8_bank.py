"""FP8 experts on a device, with the interpreter for one: a checkpoint's values as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ep_kernels.bank import KeptExpert
from ep_kernels.bundle import checksum, checksum_of, open_bundle, pack_bundle
from ep_kernels.fp8 import BlockScaled, Weight, block_scaled, dense, rounded_rows
from ep_kernels.packed import Matrix
from ep_kernels.shadow import fp8_fault, fp8_row, shadow_fault, shadow_row
from ep_kernels.triton.bank import DeviceBank, Fp8Bank
from ep_kernels.triton.device import Device, open_device
from ep_kernels.triton.flights import Flights
from ep_kernels.triton.grouped_gemm import SlotWeights, expert_ffn
from torch.nn.functional import linear, silu

from expert_svc.engines import open_engine
from mesh.config import load
from moe_model.errors import BadConfig
from moe_model.spec import load_spec
from tests.support.fp8 import write_fp8

HIDDEN, INTER, TOP_K = 256, 128, 2

Tensors = tuple[Weight, Weight, Weight]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


def new_bank(device: Device, slots: int, kind: type[DeviceBank] = Fp8Bank) -> DeviceBank:
    return kind(slots, HIDDEN, INTER, top_k=TOP_K, device=device, loading=device.stream())


def drawn(rng: torch.Generator) -> Tensors:
    """Blocks of different size."""
    gate, up = torch.randn(2, INTER, HIDDEN, generator=rng) * HIDDEN**-0.5
    up[:, 128:] *= 30.0
    return gate, up, torch.randn(HIDDEN, INTER, generator=rng) * INTER**-0.5


def published(tensors: Tensors) -> Tensors:
    """As an FP8 checkpoint has them."""
    gate, up, down = (block_scaled(tensor) for tensor in tensors)
    return gate, up, down


def plain(x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """Dequantised weights, activations rounded before each product, sums in fp32."""
    gate, up, down = (dense(block_scaled(tensor)) for tensor in tensors)
    rows = rounded_rows(x)
    return linear(rounded_rows(silu(linear(rows, gate)) * linear(rows, up)), down)


def bits(matrix: Matrix) -> tuple[bytes, bytes]:
    assert matrix.scales is not None
    return matrix.values.view(torch.uint8).numpy().tobytes(), matrix.scales.numpy().tobytes()


@pytest.mark.parametrize("source", [published, tuple], ids=["fp8", "fp32"])
def test_a_batch_is_the_dequantised_reference(
    source: type, device: Device, rng: torch.Generator
) -> None:
    bank, experts = new_bank(device, 3), [source(drawn(rng)) for _ in range(3)]
    for slot, tensors in enumerate(experts):
        bank.install(slot, slot + 7, bank.pack(bank.keep(*tensors)))
    x = torch.randn(5, HIDDEN, generator=rng).bfloat16()
    token, slot = [3, 0, 0, 1, 4, 4], [1, 2, 0, 0, 2, 1]  # token 2 has no pair
    weight = np.random.default_rng(1).random(len(token), dtype=np.float32)
    flights = Flights(device)
    flight = flights.begin(bank, [x[:2], x[2:]], np.int32(token), np.int32(slot), weight)
    flights.wait(flight)
    wanted = torch.zeros(5, HIDDEN)
    for at, which, factor in zip(token, slot, weight.tolist(), strict=True):
        wanted[at] += factor * plain(x[at : at + 1].float(), experts[which])[0]
    # Rows are rounded to bf16, and a sum in another order to a neighbour in e4m3.
    torch.testing.assert_close(flight.rows, wanted, rtol=0, atol=2**-6 * float(wanted.abs().max()))
    assert (flight.rows[2] == 0).all()


@pytest.mark.parametrize("tokens", [1, 33], ids=["decode", "prefill"])
def test_experts_that_lie_apart_give_the_bits_of_those_together(
    tokens: int, device: Device, rng: torch.Generator
) -> None:
    bank = new_bank(device, 2)
    held = [bank.pack(bank.keep(*drawn(rng))) for _ in range(2)]
    for slot, expert in enumerate(held):
        bank.install(slot, slot, expert)
    matrices = [expert.kept() for expert in held]
    together = SlotWeights(
        *(torch.stack([getattr(m, part).values for m in matrices]) for part in ("gate_up", "down")),
        *(torch.stack([getattr(m, part).scales for m in matrices]) for part in ("gate_up", "down")),
    )
    x = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()
    slots = torch.randint(-1, 2, (tokens, TOP_K), generator=rng).int()
    weights = torch.rand(tokens, TOP_K, generator=rng)
    apart = bank.table(*torch.from_numpy(bank.addresses))
    assert torch.equal(
        expert_ffn(x, slots, weights, apart), expert_ffn(x, slots, weights, together)
    )


def test_a_checkpoints_values_are_kept_as_they_are_and_travel(
    device: Device, rng: torch.Generator
) -> None:
    ours, theirs, tensors = new_bank(device, 1), new_bank(device, 1), published(drawn(rng))
    kept = ours.keep(*tensors)
    gate, up, down = tensors
    assert isinstance(gate, BlockScaled)
    assert isinstance(up, BlockScaled)
    assert isinstance(down, BlockScaled)
    whole = Matrix(kept.gate_up.storage, torch.cat([gate.values, up.values]),
                   torch.cat([gate.scales, up.scales]))  # fmt: skip
    assert bits(kept.gate_up) == bits(whole)
    assert bits(kept.down) == bits(Matrix(kept.down.storage, down.values, down.scales))
    assert fp8_fault(tensors, kept) == ""
    first = ours.pack(kept)
    assert first.nbytes == 3 * HIDDEN * INTER * (1 + 4 / 128**2)
    bundle = pack_bundle(first.kept(), 2, 5)
    assert checksum(bundle) == checksum_of(kept, 2, 5)
    second = theirs.pack(open_bundle(bundle, 2, 5))
    bundle.fill_(0)  # its memory is given away, not referred to
    assert checksum_of(second.kept(), 2, 5) == checksum_of(kept, 2, 5)
    rows = [shadow_row(weights, 2, 5, HIDDEN) for weights in (first, second)]
    assert shadow_fault(*rows, exact=True) == "", "the same bits by the same kernels"
    assert shadow_fault(rows[0], fp8_row(kept, 2, 5), rounded=True, fp8=True) == ""
    other = fp8_row(ours.keep(*drawn(rng)), 2, 5)
    assert shadow_fault(rows[0], other, rounded=True, fp8=True)


def test_a_matrix_that_is_not_what_rounding_makes_is_found(
    device: Device, rng: torch.Generator
) -> None:
    bank, tensors = new_bank(device, 1), drawn(rng)
    kept = bank.keep(*tensors)
    assert fp8_fault(tensors, kept) == ""
    assert "differs" in fp8_fault(published(drawn(rng)), kept)
    down = kept.down
    assert down.scales is not None
    values = down.values.view(torch.uint8).clone()
    values[3, 5] ^= 0x10  # another power of two
    for wrong in (
        Matrix(down.storage, values.view(down.values.dtype), down.scales),
        Matrix(down.storage, down.values, down.scales * 1.1),
    ):
        assert "further away" in fp8_fault(tensors, KeptExpert(False, kept.gate_up, wrong))


def test_banks_of_another_kind_and_sizes_are_refused(device: Device, rng: torch.Generator) -> None:
    fp8, bf16 = new_bank(device, 1), new_bank(device, 1, DeviceBank)
    tensors = drawn(rng)
    for here, there in ((fp8, bf16), (bf16, fp8)):
        with pytest.raises(ValueError, match="matrices where this device keeps"):
            here.pack(there.keep(*tensors))
        with pytest.raises(ValueError, match="an expert of"):
            here.install(0, 1, there.pack(there.keep(*tensors)))
    kept = fp8.keep(*tensors)
    with pytest.raises(ValueError, match="has scales"):
        fp8.pack(KeptExpert(False, kept.gate_up, Matrix(kept.down.storage, kept.down.values)))
    with pytest.raises(ValueError, match="intermediate 96: expected both"):
        Fp8Bank(1, 256, 96, top_k=1, device=device, loading=device.stream())
    # A bf16 bank takes an FP8 checkpoint's matrices dequantised.
    gate = published(tensors)[0]
    kept = bf16.keep(*published(tensors))
    assert torch.equal(kept.gate_up.values[:INTER], dense(gate).bfloat16())


def test_a_worker_keeps_what_the_setting_and_the_checkpoint_say(
    checkpoints: Path, device: Device
) -> None:
    small, twin = write_fp8(checkpoints / "short-fp8")
    for path, weights, kind in (
        (small, "auto", Fp8Bank),
        (small, "bf16", DeviceBank),
        (twin, "auto", DeviceBank),
        (twin, "fp8", Fp8Bank),
    ):
        settings = {"expert.device": device.name, "expert.weights": weights}
        engine = open_engine(load(None, settings, {}).settings, path, load_spec(path))
        assert type(engine.new_bank(1)) is kind
    with pytest.raises(BadConfig, match=r"none where expert\.device is cpu"):
        open_engine(load(None, {}, {}).settings, small, load_spec(small))
