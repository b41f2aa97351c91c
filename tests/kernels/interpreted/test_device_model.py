"""A router's model on a device, with the interpreter for one, gives transformers' logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ep_kernels.triton.device import Device, open_device

from moe_model.device.model import DeviceCache, DeviceModel, load_device_model
from moe_model.device.plan import DevicePlan
from moe_model.experts import ExpertClient, LocalExperts, Ticket
from moe_model.forward import forward as run_layers
from moe_model.forward import run_to_end
from moe_model.plan import Chunk
from tests.support.checkpoints import VARIANTS, variant, write
from tests.support.oracle import Oracle

BLOCK = 8
SWITCHES = ["deepseek-yarn", "mixtral-window"]


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("interpreter")


class Served:
    """A device's router with the experts of a CPU behind it."""

    def __init__(self, path: Path, device: Device, weights: str) -> None:
        self.model: DeviceModel = load_device_model(path, device, weights=weights)
        experts = LocalExperts.load(path, weights="fp32", exact=False)
        self.waited: list[int] = []
        make = self.model.clients(lambda _decodes: experts, lambda layer, *_when: self.note(layer))
        self.client = make(b"")
        self.kv: DeviceCache = self.model.new_kv_cache(9, BLOCK)

    def note(self, layer: int) -> None:
        self.waited.append(layer)

    def logits(self, *chunks: Chunk) -> list[torch.Tensor]:
        """Of each chunk's tokens."""
        with torch.inference_mode():
            plan = self.model.plan(chunks, BLOCK)
            hidden = run_to_end(run_layers(self.model, plan, self.kv, self.client))
            logits = self.model.logits(hidden)
        return list(logits.split([len(chunk.token_ids) for chunk in chunks]))


def drawn(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, 380) for _ in range(count)]


@pytest.mark.parametrize("name", SWITCHES)
def test_chunks_decodes_and_shared_blocks_give_transformers_logits(
    name: str, checkpoints: Path, device: Device
) -> None:
    path = variant(name, checkpoints)
    served = Served(path, device, "fp32")
    first, rest = drawn(14, 1), drawn(3, 2)
    second = first[:BLOCK] + rest  # begins as ``first`` does: its first block is used again
    table, other = [6, 2], [6, 4]
    got = served.logits(Chunk(first[:5], 0, table))
    more, ahead = [], []
    more += served.logits(Chunk(first[5:12], 5, table))
    for step, begin, end in ((12, 0, 2), (13, 2, 3)):  # decodes beside the other's prompt
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


class Away:
    """Experts that have not answered when they are first asked."""

    def __init__(self, experts: ExpertClient) -> None:
        self._experts = experts

    def dispatch(self, *arguments: Any) -> Any:
        return Answering(self._experts.dispatch(*arguments))


class Answering:
    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._looks = 0

    @property
    def done(self) -> bool:
        self._looks += 1
        return self._looks > 1

    def result(self) -> torch.Tensor:
        return self._ticket.result()

    def abandon(self) -> None: ...


@pytest.mark.parametrize("name", ["deepseek-no-q-lora", "mixtral"])
def test_decode_steps_of_any_size_and_in_turns_give_transformers_logits(
    name: str, checkpoints: Path, device: Device
) -> None:
    family, config = VARIANTS[name]
    # Keys are split by the longest context, and each share is a program.
    path = write(checkpoints / f"short-{name}", family, config | {"max_position_embeddings": 96})
    served, oracle = Served(path, device, "fp32"), Oracle(path)
    texts = [drawn(count, count) for count in (11, 5, 9)]
    tables = [[6, 2], [3], [0, 7]]
    got: list[list[torch.Tensor]] = [[], [], []]
    starts = [7, 1, 5]
    for i, rows in enumerate(
        served.logits(*[Chunk(t[:s], 0, b) for t, s, b in zip(texts, starts, tables, strict=True)])
    ):
        got[i].append(rows)

    def chunk(i: int, step: int) -> Chunk:
        at = starts[i] + step
        return Chunk(texts[i][at : at + 1], at, tables[i])

    for step, groups in enumerate(([[0, 1, 2]], [[0], [1, 2]], [[2], [1], [0]], [[1, 0, 2]])):
        with torch.inference_mode():
            plans = [served.model.plan([chunk(i, step) for i in group], BLOCK) for group in groups]
            assert all(plan.loan is not None for plan in plans)
            loops = [
                run_layers(served.model, plan, served.kv, Away(served.client)) for plan in plans
            ]
            waiting = list(zip(loops, groups, strict=True))
            while waiting:  # as the step runner goes round its micro-batches
                for loop, group in tuple(waiting):
                    try:
                        next(loop)
                    except StopIteration as stop:
                        waiting.remove((loop, group))
                        rows = served.model.logits(stop.value)
                        for i, row in zip(group, rows.split(1), strict=True):
                            got[i].append(row)
            del plans, loops, loop, waiting
    for text, rows in zip(texts, got, strict=True):
        torch.testing.assert_close(torch.cat(rows), oracle.logits(text), rtol=1e-4, atol=1e-4)
    for layer in served.kv.layers:  # rows that fill a frame up wrote to no block
        used = [bool(block.any()) for block in layer[: 9 * BLOCK].split(BLOCK)]
        assert used == [i in {6, 2, 3, 0, 7} for i in range(9)]


def test_a_frame_is_lent_to_one_micro_batch_at_a_time(checkpoints: Path, device: Device) -> None:
    model = load_device_model(variant("mixtral", checkpoints), device)
    model.new_kv_cache(9, BLOCK)

    def borrow(count: int) -> DevicePlan:
        return model.plan([Chunk([9], 3, [i]) for i in range(count)], BLOCK)

    first, second = borrow(3), borrow(4)
    assert first.loan is not None
    assert second.loan is not None
    frames = [first.loan.frame, second.loan.frame]
    assert frames[0] is not frames[1]
    assert [frame.size for frame in frames] == [4, 4]
    assert first.token_ids.data_ptr() != second.token_ids.data_ptr()
    del first
    again = borrow(3)
    assert again.loan is not None
    assert again.loan.frame is frames[0]
    assert model.plan([Chunk([9, 9], 3, [0])], BLOCK).loan is None
    assert model.plan([Chunk([9], 3, [0])] * 65, BLOCK).loan is None


def test_bf16_is_as_close_as_bf16_can_be(checkpoints: Path, device: Device) -> None:
    path = variant("deepseek", checkpoints)
    served, prompt = Served(path, device, "auto"), drawn(7, 5)
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
        blocks = layer[: 4 * BLOCK].split(BLOCK)
        assert [bool(block.any()) for block in blocks] == [False, True, False, True]


def test_kernels_are_compiled_with_the_cache_and_leave_it_empty(
    checkpoints: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    path = variant("deepseek", checkpoints)
    model = load_device_model(path, device, progress=told.append)
    assert max(told) < 1
    loaded = len(told)
    monkeypatch.setattr(device, "compiles", True)
    monkeypatch.setattr("moe_model.device.model.MOST_SPLITS", 2)
    kv = model.new_kv_cache(2, BLOCK)
    assert told == sorted(told)
    assert (len(told) - loaded, told[-1]) == (5, 1.0)  # two kinds of layers, two numbers of shares
    assert not any(layer.any() for layer in kv.layers)
    plan = model.plan([Chunk([9], 0, [1])], BLOCK)
    assert plan.loan is not None, "its frames are of the new cache"


def test_what_no_step_can_take_is_refused(checkpoints: Path, device: Device) -> None:
    model = load_device_model(variant("deepseek", checkpoints), device)
    with pytest.raises(ValueError, match="at least one chunk"):
        model.plan([], BLOCK)
    with pytest.raises(ValueError, match="does not reach"):
        model.plan([Chunk([1] * 17, 0, [0])], BLOCK)
    plan = model.plan([Chunk([1], 0, [0])], BLOCK)
    with pytest.raises(ValueError, match="blocks of 16"):
        model.attend(0, model.embed(plan), plan, model.new_kv_cache(2, 16))
