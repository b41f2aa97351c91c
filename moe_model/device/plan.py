"""A step's index tensors on the device. Attention takes sequences of any length as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from ep_kernels.triton.attention import Queries
from ep_kernels.triton.device import Device
from ep_kernels.triton.transfer import upload

from moe_model.plan import Chunk, check_chunk
from moe_model.rope import Rope


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step of ``num_tokens`` rows, chunk after chunk; see ``StepPlan``. ``turn`` are the
    rotations of each row, ``[num_tokens, rotary / 2]`` complex64.
    """

    num_tokens: int
    block_size: int
    token_ids: torch.Tensor
    cache_rows: torch.Tensor
    turn: torch.Tensor
    queries: Queries


def plan_on_device(
    chunks: Sequence[Chunk], block_size: int, max_context: int, rope: Rope, device: Device
) -> DevicePlan:
    """Plan a step. Raises ``ValueError`` as ``plan_step`` does."""
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
    turn = torch.view_as_real(rope.at(torch.tensor(positions)))  # [n, rotary / 2, 2]
    token_ids, cache_rows, turned, begins, seen, table = upload(
        device,
        torch.tensor(tokens),
        torch.from_numpy(np.concatenate(rows)),
        turn,
        torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32)),
        torch.tensor(contexts, dtype=torch.int32),
        torch.from_numpy(blocks),
    )
    return DevicePlan(
        num_tokens=len(tokens),
        block_size=block_size,
        token_ids=token_ids,
        cache_rows=cache_rows,
        turn=torch.view_as_complex(turned),
        queries=Queries(begins, seen, table, max(counts), max(contexts)),
    )
