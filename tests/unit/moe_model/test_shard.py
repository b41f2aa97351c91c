"""What the ranks of a group hold, and that their parts add up to the whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace

from moe_model.forward import forward, run_to_end
from moe_model.kv_size import kv_cache_fault
from moe_model.plan import Chunk
from moe_model.shard import Shard, shard_fault
from moe_model.shard_model import RouterShard, load_shard
from moe_model.spec import load_spec
from moe_model.tensors import TensorTable

from .conftest import DEMO, SWITCHES, Oracle

BLOCK = 16
Get = Callable[[str], Oracle]


class Summed(RouterShard):
    """All ranks in this process, each with a cache of its own; rank 0's norms and gates."""

    def __init__(self, pair: Oracle, size: int, *, exact: bool = False) -> None:
        weights = "fp32" if exact else "auto"
        parts = [load_shard(pair.path, r, size, weights=weights, exact=exact) for r in range(size)]
        super().__init__(parts[0])
        self.ranks = [RouterShard(part) for part in parts]
        self.caches = [rank.new_kv_cache(64, BLOCK) for rank in self.ranks]
        self.chunks: list[Chunk] = []

    def embed(self, plan):
        return sum(rank.embed_part(plan.token_ids) for rank in self.ranks)

    def attend(self, layer, h, plan, kv):
        outs = []
        for rank, cache in zip(self.ranks, self.caches, strict=True):
            outs.append(rank.attend_part(layer, h, rank.plan(self.chunks, BLOCK), cache))
        return sum(outs[1:], outs[0]) + h

    def dense(self, layer, h):
        outs = [rank.dense_part(layer, h) for rank in self.ranks]
        return sum(outs[1:], outs[0]) + h

    def shared(self, layer, x):
        if self._layers[layer].shared is None:
            return None
        outs = [rank.shared_part(layer, x) for rank in self.ranks]
        return sum(outs[1:], outs[0])

    def logits(self, h_rows):
        return torch.cat([rank.logits_part(h_rows) for rank in self.ranks], 1)

    def run(self, chunks: list[Chunk], experts) -> torch.Tensor:
        self.chunks = chunks
        with torch.inference_mode():
            plan = self.plan(chunks, BLOCK)
            return self.logits(run_to_end(forward(self, plan, self.caches[0], experts)))


@pytest.mark.parametrize(("switch", "size"), [
    *((switch, 2) for switch in sorted(SWITCHES)),
    *((switch, 4) for switch in ("deepseek", "wide", "mixtral", "many_heads", "one_kv_head")),
])  # fmt: skip
def test_parts_add_up_to_the_whole_model(oracle: Get, switch: str, size: int) -> None:
    pair = oracle(switch)
    prompt = pair.prompt(150)
    want = pair.ours.logits(prompt)
    model = Summed(pair, size)
    table = [7, 3, 12, 5, 9, 1, 2, 40, 41, 42]
    got = [
        model.run([Chunk(prompt[:100], 0, table)], pair.ours.experts),
        model.run([Chunk(prompt[100:149], 100, table)], pair.ours.experts),
        model.run([Chunk(prompt[149:], 149, table)], pair.ours.experts),
    ]
    assert (torch.cat(got) - want).abs().max() <= 1e-4


@pytest.mark.parametrize("switch", ["deepseek", "wide", "mixtral"])
def test_exact_parts_do_not_depend_on_the_batch(oracle: Get, switch: str) -> None:
    pair = oracle(switch)
    prompts = [pair.prompt(length, seed=2) for length in (40, 17, 90)]
    tables = [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9, 10]]
    model = Summed(pair, 2, exact=True)
    chunks = [Chunk(p, 0, t) for p, t in zip(prompts, tables, strict=True)]
    together = model.run(chunks, pair.exact.experts)
    alone = torch.cat([model.run([chunk], pair.exact.experts) for chunk in chunks])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("switch", ["demo", "deepseek", "biases", "mixtral", "one_kv_head", "tied"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_value_is_held_once_or_by_all(oracle: Get, switch: str, size: int) -> None:
    spec = load_spec(DEMO if switch == "demo" else oracle(switch).path)
    # Only heads must divide evenly.
    spec = replace(
        spec,
        vocab_size=161,
        dense_intermediate=97,
        shared_intermediate=49 if spec.shared_intermediate else 0,
    )
    shards = [Shard(spec, rank, size) for rank in range(size)]
    for ref, role in refs(spec):
        holders = [shard for shard in shards if shard.holds(role)]
        cuts = [shard.cut(role) for shard in holders]
        if role in {"router", "router_bias", "o_bias"}:
            assert len(holders) == 1
            continue
        assert len(holders) == size
        if cuts[0] is None:
            assert cuts == [None] * size
            continue
        extent = ref.shape[cuts[0].dim]
        held = [0] * extent
        for cut in cuts:
            assert cut is not None
            for index in range(cut.start, cut.stop):
                held[index] += 1
        copies = set(held)
        keys = getattr(spec.attention, "num_kv_heads", size)
        assert copies == ({max(1, size // keys)} if role in {"k", "v"} else {1}), role


def refs(spec):
    table = TensorTable(spec)
    yield from ((table.ref(role), role) for role in ("embedding", "head"))
    for layer in range(spec.num_layers):
        yield from ((table.ref(role, layer), role) for role in table.layer_roles(layer))


def test_a_rank_holds_its_part_only(oracle: Get) -> None:
    pair = oracle("deepseek")
    leader, other = (RouterShard(load_shard(pair.path, rank, 2)) for rank in (0, 1))
    assert other._layers[1].gate is None
    assert leader._layers[1].gate is not None
    assert [m.vocabulary_size for m in (leader, other)] == [80, 80]
    assert other._table.shape[0] == 80
    assert other._layers[0].dense._down.in_features == 48
    mixtral = oracle("mixtral")
    whole = mixtral.ours.model.kv_bytes_per_block(BLOCK)
    half = RouterShard(load_shard(mixtral.path, 1, 2))
    assert half.kv_bytes_per_block(BLOCK) == whole // 2
    # What is checked before there are weights is what the cache will take.
    spec = mixtral.ours.model.spec
    blocks = -(-spec.max_context // BLOCK)
    for size, model in ((1, mixtral.ours.model), (2, half)):
        needed = model.new_kv_cache(blocks, BLOCK).nbytes
        assert kv_cache_fault(spec, needed, BLOCK, size) == ""
        assert f"at least {needed}," in kv_cache_fault(spec, needed - 1, BLOCK, size)


@pytest.mark.parametrize(("switch", "size", "fault"), [
    ("deepseek", 3, "4 attention heads / 3 = 1.333 heads a rank, expected whole"),
    ("mixtral", 8, "4 attention heads / 8 = 0.5 heads a rank, expected whole"),
    ("mixtral", 4, ""),
    ("one_kv_head", 4, ""),
    ("deepseek", 1, ""),
])  # fmt: skip
def test_what_cannot_be_divided_is_shown_with_its_numbers(
    oracle: Get, switch: str, size: int, fault: str
) -> None:
    assert shard_fault(load_spec(oracle(switch).path), size) == fault


def test_key_heads_and_widths_that_cannot_be_divided(oracle: Get) -> None:
    spec = load_spec(oracle("mixtral").path)
    six = replace(spec, attention=replace(spec.attention, num_heads=12, num_kv_heads=4))
    assert shard_fault(six, 6) == (
        "4 key heads / 6 = 0.6667 heads a rank, and 6 / 4 = 1.5 ranks a head: "
        "expected one of them whole"
    )
    narrow = replace(load_spec(oracle("deepseek").path), shared_intermediate=3)
    assert shard_fault(narrow, 4) == "the shared expert's width of 3 / 4 is less than 1 a rank"
