"""What the exchange does to values, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ep_kernels.fp8 import LARGEST, SMALLEST
from ep_kernels.triton.all_to_all.inbox import SCALED_VALUES, Wire


def over_the_wire(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """``x [n, hidden]`` as fp32, as the other side reads it."""
    x = x.float()
    if wire is Wire.FP32:
        return x
    if wire is Wire.BF16:
        return x.bfloat16().float()
    groups = x.view(x.shape[0], x.shape[1] // SCALED_VALUES, SCALED_VALUES)
    peak = groups.abs().amax(2, keepdim=True)
    scale = peak.clamp(min=SMALLEST) / LARGEST
    values = (groups / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (values.float() * scale).view(x.shape)


def exchanged(
    x: torch.Tensor,
    rank: torch.Tensor,
    expert: torch.Tensor,
    weight: torch.Tensor,
    run: Callable[[torch.Tensor, int], torch.Tensor],
    wire: Wire,
    back: Wire,
    *,
    exact: bool,
) -> torch.Tensor:
    """Dispatch, ``run(rows, logical expert)``, combine: ``[tokens, hidden]`` fp32.

    ``rank``, ``expert``, ``weight`` ``[tokens, top_k]``; a rank of -1 has no part in the sum.
    """
    arrived = over_the_wire(x, wire)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(x.shape[0]):
        partial: dict[int, torch.Tensor] = {}
        for where, which, share in zip(
            rank[token].tolist(), expert[token].tolist(), weight[token], strict=True
        ):
            if where < 0:
                continue
            row = run(arrived[token : token + 1], which)[0].float()
            if exact:
                out[token] += share * over_the_wire(row[None], back)[0]
            else:
                partial[where] = partial.get(where, torch.zeros_like(row)) + share * row
        for row in partial.values():
            out[token] += over_the_wire(row[None], back)[0]
    return out
