"""The kernels together: what a MoE layer on a GPU makes of a batch is what the CPU's makes."""

from __future__ import annotations

import numpy as np
import torch
from ep_kernels.gating import GateKernel, GateRule
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.routing import Places
from ep_kernels.triton.gate import gate
from ep_kernels.triton.grouped_gemm import SlotWeights, expert_ffn
from ep_kernels.triton.replicas import ReplicaSplit, Sent

EXPERTS, HIDDEN, INTER, RANKS = 16, 64, 32, 2


def test_a_layer_is_what_the_cpu_computes_wherever_the_replicas_are(rng: torch.Generator) -> None:
    rule = GateRule(EXPERTS, 4, "sigmoid", 4, 2, epsilon=1e-20, scale=2.5)
    bias = torch.randn(EXPERTS, generator=rng)
    x = torch.randn(23, HIDDEN, generator=rng).bfloat16()
    logits = x.float() @ torch.randn(HIDDEN, EXPERTS, generator=rng)
    gate_up = (torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=rng) * HIDDEN**-0.5).bfloat16()
    down = (torch.randn(EXPERTS, HIDDEN, INTER, generator=rng) * INTER**-0.5).bfloat16()

    experts, weights = GateKernel(rule, bias)(logits)
    bank = ExpertBank(EXPERTS, HIDDEN, INTER)
    for expert in range(EXPERTS):
        bank.load(expert, expert, *gate_up[expert].chunk(2), down[expert])
    wanted = torch.empty(x.shape[0], HIDDEN)
    token = np.arange(x.shape[0], dtype=np.int32).repeat(rule.top_k)
    bank.run(x, token, experts.flatten().numpy(), weights.flatten().numpy(), wanted)

    # Expert e lives on rank e % 2, and every third of them on the other as well.
    ranks = [sorted({e % RANKS} | ({0, 1} if e % 3 == 0 else set())) for e in range(EXPERTS)]
    holds = [expert for expert, own in enumerate(ranks) for _ in own]  # of each place
    first = np.cumsum([0, *map(len, ranks)], dtype=np.int32)
    rank = np.array([r for own in ranks for r in own], dtype=np.int32)
    physical = np.arange(len(holds), dtype=np.int32)
    places = Places(first, rank, np.zeros_like(rank))

    chosen, chosen_weights = gate(logits, rule, bias)
    slots = ReplicaSplit(places, physical, Sent.nothing(RANKS, "cpu"))(chosen)
    got = torch.zeros(x.shape[0], HIDDEN)
    for here in range(RANKS):
        own = torch.from_numpy(np.flatnonzero(rank == here))  # places of this rank, its local slots
        local = torch.full((len(holds),), -1).scatter(0, own, torch.arange(own.numel()))
        held = torch.tensor(holds)[own]
        bank_here = SlotWeights(gate_up[held], down[held])
        got += expert_ffn(x, local[slots.long()].int(), chosen_weights, bank_here)
    assert torch.equal(chosen, experts)
    # The CPU's sums stay in fp32, a GPU's are rounded to bf16 twice on the way.
    size = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=0, atol=2**-6 * size)
