"""The layer loop: the only one, whether the experts are in this process or in a mesh."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from moe_model.architecture import ModelSpec
from moe_model.experts import ExpertClient, Ticket
from moe_model.plan import Chunk
from moe_model.sampler import TokenSampler

MakeClient: TypeAlias = Callable[[bytes], ExpertClient]
"""``decodes -> client`` of one micro-batch: a byte a token, 1 if it belongs to a decode step."""

Computed: TypeAlias = Callable[[int, int, int], None]
"""``(layer, began_ns, ended_ns)``: a device computed for a layer. See ``RouterModel.clients``."""


class LayerModel(Protocol):
    """What the loop needs of a model; see ``RouterModel``, which others may wrap. Plan and cache
    are the model's own kind.
    """

    spec: ModelSpec

    def embed(self, plan: Any) -> torch.Tensor: ...

    def attend(self, layer: int, h: torch.Tensor, plan: Any, kv: Any) -> torch.Tensor: ...

    def dense(self, layer: int, h: torch.Tensor) -> torch.Tensor: ...

    def gate(
        self, layer: int, h: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def shared(self, layer: int, x: torch.Tensor) -> torch.Tensor | None: ...


class ServedModel(LayerModel, Protocol):
    """What a router's engine needs of a model; see ``RouterModel``."""

    @property
    def waited_ns(self) -> int: ...

    def kv_bytes_per_block(self, block_size: int) -> int: ...

    def new_kv_cache(self, num_blocks: int, block_size: int) -> Any: ...

    def plan(self, chunks: Sequence[Chunk], block_size: int = 16) -> Any: ...

    def logits(self, h_rows: torch.Tensor) -> torch.Tensor: ...

    def sampler(self) -> TokenSampler: ...

    def clients(self, make: MakeClient, computed: Computed) -> MakeClient: ...


def forward(
    model: LayerModel, plan: Any, kv: Any, experts: ExpertClient
) -> Generator[Ticket, None, torch.Tensor]:
    """Run all layers of one micro-batch; writes its tokens to ``kv``.

    Yields a ticket whenever its experts have not answered yet: the caller runs something else and
    resumes once the ticket is ``done`` (resuming earlier only yields it again). Returns the final
    hidden states ``[tokens, hidden]``, from which ``model.logits`` makes logits. Errors of the
    experts pass through; the micro-batch is then lost, its cache rows hold no promise. Whatever
    ends it early, ``close()`` of the generator included, abandons the dispatch under way. Create
    and resume under ``torch.inference_mode``.
    """
    moe_layers = frozenset(model.spec.moe_layers)
    h = model.embed(plan)
    for layer in range(model.spec.num_layers):
        h = model.attend(layer, h, plan, kv)
        if layer not in moe_layers:
            h = model.dense(layer, h)
            continue
        x, topk_ids, topk_weights = model.gate(layer, h)
        ticket = experts.dispatch(layer, x, topk_ids, topk_weights)
        try:
            shared = model.shared(layer, x)  # computed while the routed experts work
            if shared is not None:
                h = shared.add_(h)
            while not ticket.done:
                yield ticket
            h = h.add_(ticket.result())
        except BaseException:
            ticket.abandon()
            raise
    return h


def run_to_end(steps: Generator[Ticket, None, torch.Tensor]) -> torch.Tensor:
    """Drive ``forward`` with experts that answer at once."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            hidden: torch.Tensor = stop.value
            return hidden
