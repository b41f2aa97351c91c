"""The seam between a router and the experts, and the experts when they are in this process.

A router *dispatches* a layer's tokens and gets a ``Ticket``; the result is *combined* back when it
is there. ``LocalExperts`` answers at once; a mesh's client sends the tokens to expert workers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from ep_kernels.fp8 import Weight
from ep_kernels.grouped_ffn import ExpertBank
from ep_kernels.packed import Kind

from moe_model.architecture import ModelSpec
from moe_model.checkpoint import Checkpoint
from moe_model.fp8 import refuse_on_cpu
from moe_model.spec import load_spec
from moe_model.tensors import TensorTable


class Ticket(Protocol):
    """The routed experts' answer to one dispatch."""

    @property
    def done(self) -> bool:
        """Whether ``result`` can be had without waiting. Never blocks."""

    def result(self) -> torch.Tensor:
        """The weighted sum of each token's experts, ``[tokens, hidden]`` fp32, the caller's own.

        Only once ``done``; raises what kept the experts from answering.
        """

    def abandon(self) -> None:
        """Nobody will ask for the result (any more): let go of what is held for it. May be called
        at any time, and more than once.
        """


class ExpertClient(Protocol):
    """Runs routed experts somewhere."""

    @property
    def on_device(self) -> bool:
        """Whether ``x`` and results lie on the device that the model computes on, where that is not
        the CPU; else on the host. Ids and weights always lie on the host.
        """

    def dispatch(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        """Send ``x`` ``[tokens, hidden]`` to logical experts ``topk_ids`` ``[tokens, k]`` of
        ``layer``. The caller changes none of the tensors before the ticket is done.
        """


class _Answered:
    """A ticket whose result is there from the start."""

    __slots__ = ("_out",)

    done = True

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out

    def result(self) -> torch.Tensor:
        return self._out

    def abandon(self) -> None:
        pass


class LocalExperts:
    """All routed experts of a model in this process; slot ``e`` holds logical expert ``e``."""

    on_device = False

    def __init__(self, banks: dict[int, ExpertBank], *, exact: bool) -> None:
        self._banks = banks
        self._exact = exact

    @staticmethod
    def load(
        path: Path,
        *,
        weights: Kind = "auto",
        exact: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> LocalExperts:
        """Read every routed expert of the checkpoint at ``path``.

        Raises ``CheckpointError`` before any is converted if one is missing or wrong, or FP8.
        """
        spec = load_spec(path)
        total = len(spec.moe_layers) * spec.num_experts
        banks: dict[int, ExpertBank] = {}
        refuse_on_cpu(spec, path, "expert.device")
        with Checkpoint(path) as checkpoint, torch.inference_mode():
            checkpoint.check(TensorTable(spec).experts())
            for layer in spec.moe_layers:
                bank = new_bank(spec, spec.num_experts, weights=weights, exact=exact)
                for expert in range(spec.num_experts):
                    bank.load(expert, expert, *read_expert(checkpoint, spec, layer, expert))
                    if progress is not None:
                        progress((len(banks) * spec.num_experts + expert + 1) / total)
                banks[layer] = bank
        return LocalExperts(banks, exact=exact)

    def dispatch(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> Ticket:
        bank = self._banks[layer]
        tokens, top_k = topk_ids.shape
        slot = topk_ids.numpy().astype(np.int32).reshape(-1)
        token = np.arange(tokens * top_k, dtype=np.int32) // top_k
        if self._exact:
            rows = torch.empty(tokens * top_k, x.shape[1])
            bank.run_rows(x, token, slot, rows)
            return _Answered(combine_rows(rows.view(tokens, top_k, x.shape[1]), topk_weights))
        out = torch.empty(x.shape)
        bank.run(x, token, slot, topk_weights.numpy().reshape(-1), out)
        return _Answered(out)


def new_bank(
    spec: ModelSpec, num_slots: int, *, weights: Kind = "auto", exact: bool = False
) -> ExpertBank:
    """An empty bank of ``num_slots`` slots for one MoE layer of the model."""
    return ExpertBank(
        num_slots, spec.hidden_size, spec.expert_intermediate, kind=weights, exact=exact
    )


def read_expert(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert: int
) -> tuple[Weight, Weight, Weight]:
    """Gate and up ``[intermediate, hidden]``, down ``[hidden, intermediate]`` of a routed expert,
    in the type they are stored in and backed by the file.

    Raises ``MissingTensor``, ``WrongShape`` or ``WrongDtype``.
    """
    gate, up, down = TensorTable(spec).expert(layer, expert)
    return checkpoint.read_weight(gate), checkpoint.read_weight(up), checkpoint.read_weight(down)


def combine_rows(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Exact combine: unweighted ``rows [tokens, k, hidden]`` and ``weights [tokens, k]`` ->
    ``[tokens, hidden]``, added in top-k order.

    Products and sums are separate operations, each correctly rounded, so the result is the same
    bits wherever and in whatever company it is computed.
    """
    scaled = rows * weights.unsqueeze(2)
    out = scaled[:, 0].clone()
    for k in range(1, rows.shape[1]):
        out.add_(scaled[:, k])
    return out
