"""The demo model's recipe, piece by piece, and the model that ships."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import tarfile
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from demo.recipe import rdata
from demo.recipe.data import Windows
from demo.recipe.experts import routed_experts
from demo.recipe.export import checkpoint_tensors, round_weights
from demo.recipe.gate import Gate, select_experts
from demo.recipe.head import CHUNK, head_loss
from demo.recipe.html_text import html_to_text
from demo.recipe.model import Model, ModelConfig
from demo.recipe.muon import orthogonalise
from demo.recipe.packages import deb_members
from demo.recipe.tokenizer import is_held_out
from demo.recipe.train import Hyperparameters

MODEL = Path(__file__).parents[3] / "demo" / "model"
MAX_BYTES = 12_000_000

TINY = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=16,
)


def brute_force_selection(
    scores: list[float], bias: list[float], groups: int, top_groups: int, k: int
) -> list[int]:
    corrected = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(corrected) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    rank = [sum(sorted((corrected[e] for e in group), reverse=True)[:2]) for group in members]
    best = sorted(range(groups), key=lambda g: -rank[g])[:top_groups]
    allowed = [e for g in best for e in members[g]]
    return sorted(allowed, key=lambda e: -corrected[e])[:k]


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "k"), [(32, 4, 2, 4), (8, 4, 1, 2), (16, 2, 2, 3)]
)
def test_gate_selects_like_brute_force(experts: int, groups: int, top_groups: int, k: int):
    generator = torch.Generator().manual_seed(experts)
    scores = torch.rand(64, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) * 0.3
    chosen = select_experts(scores, bias, groups, top_groups, k)
    for row, expected_from in zip(chosen.tolist(), scores.tolist(), strict=True):
        assert row == brute_force_selection(expected_from, bias.tolist(), groups, top_groups, k)


def test_gate_weights_come_from_the_scores_without_the_bias():
    gate = Gate(width=16, experts=8, groups=4, top_groups=2, k=2, scale=2.0)
    torch.nn.init.normal_(gate.weight)
    gate.e_score_correction_bias.copy_(torch.linspace(-1, 1, 8))
    x = torch.randn(10, 16)
    chosen, weights = gate(x)
    scores = (x @ gate.weight.t()).sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, 2.0 * scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize("case", ["random", "one expert takes all", "one token", "no token"])
def test_experts_match_the_plain_formula_and_its_gradients(case: str):
    tokens = {"one token": 1, "no token": 0}.get(case, 12)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(tokens, 5, generator=generator).argsort(1)[:, :2]
    if case == "one expert takes all":
        chosen = torch.full((tokens, 2), 3)
    shapes = [(tokens, 6), (tokens, 2), (5, 8, 6), (5, 6, 4)]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def reference(x, weights, gate_up, down):
        gate, up = torch.einsum("nkmd,nd->nkm", gate_up[chosen], x).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        return torch.einsum("nkdm,nkm,nk->nd", down[chosen], inner, weights)

    def ours(x, weights, gate_up, down):
        return routed_experts(x, chosen, weights, gate_up, down)[0]

    mine, plain = ([x.clone().requires_grad_() for x in leaves] for _ in range(2))
    y, expected = ours(*mine), reference(*plain)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_experts_count_the_tokens_of_each_expert():
    chosen = torch.tensor([[0, 2], [2, 3], [2, 0]])
    load = routed_experts(
        torch.zeros(3, 6), chosen, torch.ones(3, 2), torch.zeros(5, 8, 6), torch.zeros(5, 6, 4)
    )[1]
    assert load.tolist() == [2, 0, 3, 1, 0]


@pytest.mark.parametrize("rows", [1, CHUNK, CHUNK + 3])
def test_head_loss_is_cross_entropy_with_its_gradients(rows: int):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(9, (rows,), generator=generator)
    loss = head_loss(x, weight, target)
    expected = torch.nn.functional.cross_entropy(x @ weight.t(), target)
    torch.testing.assert_close(loss, expected)
    ours = torch.autograd.grad(loss, (x, weight))
    for a, b in zip(ours, torch.autograd.grad(expected, (x, weight)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8)])
def test_muon_brings_all_singular_values_near_one(shape: tuple[int, int, int]):
    update = orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.6
    assert values.max() < 1.3


def windows(seed: int) -> Windows:
    topics = [np.arange(0, 500, dtype=np.uint16), np.arange(1000, 1300, dtype=np.uint16)]
    return Windows(topics, 16, seed)


def test_windows_depend_on_the_seed_alone():
    first, again, other = windows(1), windows(1), windows(2)
    batches = [first.next(3) for _ in range(40)]
    assert all(torch.equal(batch, again.next(3)) for batch in batches)
    assert not all(torch.equal(batch, other.next(3)) for batch in batches)


def test_windows_can_skip_what_an_interrupted_run_used():
    used, resumed = windows(1), windows(1)
    for _ in range(37):  # past the end of an epoch
        used.next(3)
    resumed.skip(37 * 3)
    assert torch.equal(used.next(3), resumed.next(3))


def test_windows_of_an_epoch_share_no_training_position():
    data = windows(1)
    inputs = data.next(40)[:, :-1].flatten().tolist()  # an epoch has 47 or more windows
    assert len(set(inputs)) == len(inputs)


def test_learning_rate_warms_up_stays_and_decays():
    hyper = Hyperparameters(steps=1000)
    scale = [hyper.lr_scale(step) for step in range(1000)]
    assert scale[0] == pytest.approx(1 / 30)
    assert scale[29:400] == [1.0] * 371
    assert scale[700] == pytest.approx(0.5)
    assert scale[999] == pytest.approx(0.02)


def test_two_percent_of_the_documents_are_held_out():
    assert sum(is_held_out(i) for i in range(1000)) == 20


def test_decoding_with_the_cache_equals_one_pass():
    model = Model(TINY, seed=3)
    torch.nn.init.normal_(model.lm_head.weight)
    ids = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    with torch.no_grad():
        steps = [model(ids[:, :4], cache)]
        steps += [model(ids[:, i : i + 1], cache, i) for i in range(4, 9)]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids))


def test_exported_tensors_hold_the_stacked_experts_apart():
    model = Model(TINY)
    tensors = checkpoint_tensors(model, torch.bfloat16)
    moe = model.moe_layers[0]
    prefix = "model.layers.1.mlp.experts.5"
    gate_up = torch.cat([tensors[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(gate_up, moe.gate_up[5].bfloat16())
    assert torch.equal(tensors[f"{prefix}.down_proj.weight"], moe.down[5].bfloat16())
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_rounded_weights_are_those_of_the_export():
    model = Model(TINY, seed=1)
    exported = checkpoint_tensors(model, torch.bfloat16)
    rounded = checkpoint_tensors(round_weights(model), torch.float32)
    assert all(torch.equal(rounded[name], x.float()) for name, x in exported.items())


def test_html_becomes_paragraphs_and_keeps_preformatted_text():
    page = "<head>no</head><p>One  &amp;\ntwo</p><ul><li>item</ul><pre>a\n  b</pre>"
    parts = [part for part in html_to_text(page).split("\n\n") if part]
    assert parts == ["One & two", "* item", "a\n  b"]


def test_r_database_yields_its_character_vectors():
    def serialise(texts: list[str]) -> bytes:
        body = b"X\n" + struct.pack(">iii", 2, 0, 0) + struct.pack(">ii", 16, len(texts))
        for text in texts:
            body += struct.pack(">ii", 9, len(text)) + text.encode()
        return body

    books = [["Title", "", "line"], ["Other"]]
    database = b""
    for book in books:
        blob = serialise(book)
        database += struct.pack(">i", len(blob)) + zlib.compress(blob)
    assert [rdata.strings(blob) for blob in rdata.objects(database)] == books
    assert rdata.strings(b"X\n" + struct.pack(">iiiii", 2, 0, 0, 13, 0)) is None


def test_debian_package_yields_the_files_of_its_data_archive(tmp_path: Path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/share/text")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"hello"))
    package = b"!<arch>\n"
    for name, body in (("debian-binary", b"2.0"), ("data.tar.xz", buffer.getvalue())):
        header = f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n"
        package += header.encode() + body + b"\n" * (len(body) % 2)
    path = tmp_path / "tiny.deb"
    path.write_bytes(package)
    assert list(deb_members(path)) == [("./usr/share/text", b"hello")]


def test_shipped_files_match_the_sums_in_the_model_card():
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    sums = dict(re.findall(r"^\| `([^`]+)` \| [\d,]+ \| `([0-9a-f]{64})` \|$", card, re.MULTILINE))
    actual = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in MODEL.iterdir()
        if path.name != "README.md"
    }
    assert actual == sums


def test_shipped_model_is_small():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_BYTES


def test_shipped_model_has_the_architecture_of_the_recipe():
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    expected = asdict(ModelConfig())
    assert {key: config[key] for key in expected} == expected
    tensors = checkpoint_tensors(Model(ModelConfig()), torch.bfloat16)
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        shipped = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert shipped == {name: list(x.shape) for name, x in tensors.items()}
