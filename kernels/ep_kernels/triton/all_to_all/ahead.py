"""What is compiled ahead of time of the exchange: DeepSeek-V3's sizes, four routers, 32 ranks."""

from __future__ import annotations

from typing import Any

import triton

from ep_kernels.triton.all_to_all import answer, arrive, combine, drain, plan, put
from ep_kernels.triton.all_to_all.end import ExchangeShape
from ep_kernels.triton.all_to_all.inbox import Wire
from ep_kernels.triton.registry import Variant
from ep_kernels.triton.tuning import Tile, tile

_SHAPES = {
    "FP8 out, bf16 back": ExchangeShape(4, 32, 2, 128, 8, 7168),
    "fp32, exact": ExchangeShape(4, 32, 2, 128, 8, 7168, Wire.FP32, Wire.FP32, exact=True),
}

_FLAGS = {
    "stamp_ptr": "*i64:16",
    "sent_ptr": "*i64:16",
    "seen_ptr": "*i64:16",
    "go_ptr": "*i64:16",
    "got_ptr": "*i64:16",
    "where_ptr": "*i64:16",
    "source_ptr": "*i64:16",
    "target_ptr": "*i64:16",
    "address_ptr": "*i64:16",
    "inbox": "i64:16",
    "limit_ns": "i64",
    "x_stride": "i32:16",
    "y_stride": "i32:16",
    "weight_ptr": "*fp32:16",
    "out_ptr": "*fp32:16",
    "x_ptr": "*bf16:16",
    "y_ptr": "*bf16:16",
}


def variants(architecture: int) -> tuple[Variant, ...]:
    """Every kernel of the exchange, for both kinds of it."""
    found = []
    for name, shape in _SHAPES.items():
        for kernel, function, shown, constants, expects, own in _kernels(shape, architecture):
            found.append(
                Variant(
                    kernel=f"all_to_all.{kernel}",
                    name=name,
                    function=function,
                    signature=signature_of(function, own),
                    constexprs=constants,
                    num_warps=shown.num_warps,
                    num_stages=shown.num_stages,
                    hot=True,
                    expects=expects,
                )
            )
    return tuple(found)


def _kernels(
    shape: ExchangeShape, architecture: int
) -> list[tuple[str, Any, Tile, dict[str, Any], str, dict[str, str]]]:
    requests, answers = shape.requests, shape.answers

    def row(
        kernel: str, function: Any, constants: Any, expects: str = "", **own: str
    ) -> tuple[str, Any, Tile, dict[str, Any], str, dict[str, str]]:
        shown = tile(kernel, architecture)
        return kernel, function, shown, constants(shown), expects, own

    return [
        row(
            "plan",
            plan.plan_kernel,
            lambda t: plan.constants_of(
                answers, shape.capacity_tokens, shape.top_k, t, exact=shape.exact, claim=True
            ),
            pair_weight_ptr="*fp32:16",
        ),
        row(
            "put",
            put.put_kernel,
            lambda t: (
                put.constants_of(requests, t, pairs=True)
                | {"LIST": shape.capacity_tokens, "PAIR_LIST": shape.capacity_pairs}
            ),
            r"STG\.E\.128\S*",
        ),
        row("arrive", arrive.arrive_kernel, lambda t: arrive.constants_of(requests, t)),
        row(
            "answer",
            answer.answer_kernel,
            lambda t: answer.constants_of(
                answers, t, top_k=shape.top_k, exact=shape.exact, post=True
            ),
            r"STG\.E\.128\S*",
        ),
        row(
            "combine",
            combine.combine_kernel,
            lambda t: combine.constants_of(
                answers, t, top_k=shape.top_k, exact=shape.exact, streamed=False
            ),
            r"LDG\.E\.128\S*",
        ),
        row(
            "drain",
            drain.drain_kernel,
            lambda t: drain.constants_of(requests, answers, t),
            r"STG\.E\.128\S*",
        ),
    ]


def signature_of(function: triton.JITFunction, own: dict[str, str]) -> dict[str, str]:
    """Types by name: all other pointers are to int32, all other numbers are."""
    names = [parameter.name for parameter in function.params if not parameter.is_constexpr]
    return {
        name: own.get(name) or _FLAGS.get(name) or ("*i32:16" if name.endswith("_ptr") else "i32")
        for name in names
    }
