"""A step's index tensors on the device. Attention takes sequences of any length as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from ep_kernels.triton.attention import Queries
from ep_kernels.triton.device import Device
from ep_kernels.triton.transfer import upload

from moe_model.plan import Chunk, check_chunk
from moe_model.rope import Rope

if TYPE_CHECKING:
    from moe_model.device.decode import Loan


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step of ``num_tokens`` rows, chunk after chunk; see ``StepPlan``. ``turn`` are the
    rotations of each row, ``[num_tokens, rotary / 2]`` complex64.

    With a ``loan`` the tensors are its frame's, and may have rows beyond ``num_tokens``.
    """

    num_tokens: int
    block_size: int
    token_ids: torch.Tensor
    cache_rows: torch.Tensor
    turn: torch.Tensor
    queries: Queries
    loan: Loan | None = None


@dataclass(frozen=True, slots=True)
class StepIndex:
    """The same on the host: ``tokens``, ``cache_rows [n]`` int64; ``begins [sequences + 1]``,
    ``contexts [sequences]``, ``blocks [sequences, most blocks]`` int32; ``turn [n, rotary / 2, 2]``
    fp32.
    """

    counts: list[int]
    tokens: np.ndarray
    cache_rows: np.ndarray
    begins: np.ndarray
    contexts: np.ndarray
    blocks: np.ndarray
    turn: torch.Tensor


def index_step(chunks: Sequence[Chunk], block_size: int, max_context: int, rope: Rope) -> StepIndex:
    """Raises ``ValueError`` as ``plan_step`` does."""
    if not chunks:
        raise ValueError("a step needs at least one chunk")
    counts = [len(chunk.token_ids) for chunk in chunks]
    for chunk, count in zip(chunks, counts, strict=True):
        check_chunk(chunk, count, block_size, max_context)
    contexts = [chunk.start + count for chunk, count in zip(chunks, counts, strict=True)]
    blocks = np.zeros((len(chunks), -(-max(contexts) // block_size)), dtype=np.int32)
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[np.ndarray] = []
    for index, (chunk, context) in enumerate(zip(chunks, contexts, strict=True)):
        used = -(-context // block_size)
        blocks[index, :used] = chunk.block_table[:used]
        at = np.arange(chunk.start, context)
        tokens += chunk.token_ids
        positions += range(chunk.start, context)
        rows.append(blocks[index, at // block_size].astype(np.int64) * block_size + at % block_size)
    return StepIndex(
        counts=counts,
        tokens=np.array(tokens, dtype=np.int64),
        cache_rows=np.concatenate(rows),
        begins=np.cumsum([0, *counts], dtype=np.int32),
        contexts=np.array(contexts, dtype=np.int32),
        blocks=blocks,
        turn=torch.view_as_real(rope.at(torch.tensor(positions))),
    )


def plan_on_device(index: StepIndex, block_size: int, device: Device) -> DevicePlan:
    """Upload a step."""
    arrays = (index.tokens, index.cache_rows, index.begins, index.contexts, index.blocks)
    token_ids, cache_rows, begins, contexts, blocks, turn = upload(
        device, *map(torch.from_numpy, arrays), index.turn
    )
    return DevicePlan(
        num_tokens=index.tokens.size,
        block_size=block_size,
        token_ids=token_ids,
        cache_rows=cache_rows,
        turn=torch.view_as_complex(turn),
        queries=Queries(begins, contexts, blocks, max(index.counts), int(index.contexts.max())),
    )
