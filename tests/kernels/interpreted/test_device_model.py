"""A router's model on a device, with the interpreter for one, gives transformers' logits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from ep_kernels.triton.device import Device, open_device

from moe_model.device.model import DeviceCache, DeviceModel, load_device_model
from moe_model.experts import LocalExperts
from moe_model.forward import forward as run_layers
from moe_model.forward import run_to_end
from moe_model.plan import Chunk
from tests.support.checkpoints import variant
from tests.support.oracle import Oracle

BLOCK = 16
VARIANTS = ["deepseek-yarn", "deepseek-no-q-lora", "mixtral-window"]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


class Served:
    """A device's router with the experts of a CPU behind it."""

    def __init__(self, path: Path, device: Device, weights: str) -> None:
        self.model: DeviceModel = load_device_model(path, device, weights=weights)
        experts = LocalExperts.load(path, weights="fp32", exact=False)
        self.waited: list[int] = []
        make = self.model.clients(lambda _decodes: experts, lambda layer, _ns: self.note(layer))
        self._client = make(b"")
        self.kv: DeviceCache = self.model.new_kv_cache(9, BLOCK)

    def note(self, layer: int) -> None:
        self.waited.append(layer)

    def logits(self, *chunks: Chunk) -> list[torch.Tensor]:
        """Of each chunk's tokens."""
        with torch.inference_mode():
            plan = self.model.plan(chunks, BLOCK)
            hidden = run_to_end(run_layers(self.model, plan, self.kv, self._client))
            logits = self.model.logits(hidden)
        return list(logits.split([len(chunk.token_ids) for chunk in chunks]))


def drawn(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 380) for _ in range(count)]


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_decodes_and_shared_blocks_give_transformers_logits(
    name: str, checkpoints: Path, device: Device
) -> None:
    path = variant(name, checkpoints)
    served = Served(path, device, "fp32")
    first, rest = drawn(30, 1), drawn(6, 2)
    second = first[:BLOCK] + rest  # begins as ``first`` does: its first block is used again
    table, other = [6, 2], [6, 4]
    got = served.logits(Chunk(first[:11], 0, table))
    more, ahead = [], []
    more += served.logits(Chunk(first[11:28], 11, table))
    for step in (28, 29):  # decodes of one beside the other's prompt
        begin = 0 if step == 28 else 4
        end = 4 if step == 28 else 6
        a, b = served.logits(
            Chunk(first[step : step + 1], step, table),
            Chunk(rest[begin:end], BLOCK + begin, other),
        )
        more.append(a)
        ahead.append(b)
    oracle = Oracle(path)
    for rows, wanted in (
        (torch.cat(got + more), oracle.logits(first)),
        (torch.cat(ahead), oracle.logits(second)[BLOCK:]),
    ):
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-4)
    assert served.waited == list(served.model.spec.moe_layers) * 4, "one wait a layer and step"


def test_bf16_is_as_close_as_bf16_can_be(checkpoints: Path, device: Device) -> None:
    path = variant("deepseek", checkpoints)
    served, prompt = Served(path, device, "auto"), drawn(9, 5)
    (got,) = served.logits(Chunk(prompt, 0, [3]))
    wanted = Oracle(path).logits(prompt)
    assert served.kv.layers[0].dtype is torch.bfloat16
    assert served.model.kv_bytes_per_block(BLOCK) == 2 * 3 * BLOCK * 48
    size = float(wanted.abs().max())
    assert float((got - wanted).abs().max()) < 2**-5 * size
    assert (got.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.7


def test_cleared_blocks_are_zeros_in_every_layer(checkpoints: Path, device: Device) -> None:
    kv = load_device_model(variant("deepseek", checkpoints), device).new_kv_cache(4, BLOCK)
    for layer in kv.layers:
        layer.fill_(3.0)
    kv.clear([2, 0])
    for layer in kv.layers:
        assert [bool(block.any()) for block in layer.split(BLOCK)] == [False, True, False, True]


def test_what_no_step_can_take_is_refused(checkpoints: Path, device: Device) -> None:
    model = load_device_model(variant("deepseek", checkpoints), device)
    with pytest.raises(ValueError, match="at least one chunk"):
        model.plan([], BLOCK)
    with pytest.raises(ValueError, match="does not reach"):
        model.plan([Chunk([1] * 17, 0, [0])], BLOCK)
    plan = model.plan([Chunk([1], 0, [0])], BLOCK)
    with pytest.raises(ValueError, match="blocks of 8"):
        model.attend(0, model.embed(plan), plan, model.new_kv_cache(2, 8))
