"""What is compiled ahead of time: every kernel module's ``variants(architecture)``.

A variant is a kernel with the argument types and constants of one launch that serving makes, so
that what ``aot`` reports is what would run. To add a kernel, give its module a ``variants`` and
name the module in ``KERNEL_MODULES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

KERNEL_MODULES: Final[tuple[str, ...]] = (
    "gate",
    "counting",
    "replicas",
    "permute",
    "quantise",
    "grouped_gemm",
    "all_to_all",
    "lane_messages",
    "ahead",
    "attention",
    "rows",
    "sampling",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One launch of one kernel.

    ``signature`` gives the type of each run-time argument, by name: ``i32``, ``fp32``, ``*bf16``;
    with ``:16`` behind it when the launch passes a number or an address divisible by 16, which is
    what lets Triton load vectors. ``constexprs`` are the kernel's constants.
    """

    kernel: str
    """Its module's name, or ``module.kernel`` where a module has several."""
    name: str
    """What sets this variant apart from the kernel's others: shapes, types, regime."""
    function: Any
    """What ``triton.jit`` made; it must not come from the interpreter."""
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    hot: bool
    """Runs for every layer of every step: it must not spill registers."""
    expects: str = ""
    """A pattern of an instruction that the compiled kernel (SASS) must contain, such as the matrix
    instruction that makes it fast."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further compiler options, such as ``maxnreg``."""

    @property
    def full_name(self) -> str:
        return f"{self.kernel} [{self.name}]"


def variants(architecture: int) -> tuple[Variant, ...]:
    """All variants for one of ``tuning.ARCHITECTURES``; a module may have none for an old one."""
    found: list[Variant] = []
    for name in KERNEL_MODULES:
        module = import_module(f"{__package__}.{name}")
        found += module.variants(architecture)
    return tuple(found)
