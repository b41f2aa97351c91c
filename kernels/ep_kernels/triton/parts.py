"""Functions that kernels are made of."""

from __future__ import annotations

from typing import Any, Final

import triton

INTERPRETING: Final = bool(triton.knobs.runtime.interpret)


def part_of_kernel(function: Any) -> Any:
    """``triton.jit`` for what kernels call. The interpreter patches triton anew for each call of a
    jitted function, which takes a millisecond; a plain one it just runs.
    """
    return function if INTERPRETING else triton.jit(function)
