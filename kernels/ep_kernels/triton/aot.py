"""Compiles every registered kernel for every architecture, without a GPU.

    python -m ep_kernels.triton.aot [--arch 90] [--only grouped_gemm] [DOCUMENT]

Prints what the compiler says of each: registers a thread, spills, shared memory, and the
instruction that the kernel is meant to use. Exits 1 when a hot kernel spills, when one needs more
shared memory than the architecture has, or when its instruction is missing. With DOCUMENT the table
between the two markers in that Markdown file is written anew.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from ep_kernels.triton.registry import KERNEL_MODULES, Variant, variants
from ep_kernels.triton.tuning import ARCHITECTURES

BEGIN: Final = "<!-- make kernels-aot writes from here -->"
END: Final = "<!-- to here -->"

SHARED_BYTES: Final = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that one block may use (CUDA C++ Programming Guide, compute capabilities)."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of one variant."""

    variant: Variant
    architecture: int
    registers: int
    spill_bytes: int
    """Stored to and loaded from local memory by each thread."""
    shared_bytes: int
    instruction: str
    """The first one that ``variant.expects`` describes; empty when there is none."""

    def faults(self) -> list[str]:
        """Why this must not be shipped."""
        found = []
        if self.variant.hot and self.spill_bytes:
            found.append(f"spills {self.spill_bytes} bytes")
        if self.shared_bytes > (most := SHARED_BYTES[self.architecture]):
            found.append(f"needs {self.shared_bytes} bytes of shared memory, there are {most}")
        if self.variant.expects and not self.instruction:
            found.append(f"has no instruction like {self.variant.expects}")
        return found


def compile_variant(variant: Variant, architecture: int) -> Compiled:
    """Compile for ``architecture``, one of ``ARCHITECTURES``. Raises what Triton raises, and
    ``RuntimeError`` in a process that runs kernels in the interpreter.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("with TRITON_INTERPRET=1 there is nothing to compile")
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(variant.function.arg_names):
        if name in variant.constexprs:
            signature[name] = "constexpr"
            continue
        signature[name], _, divisor = variant.signature[name].partition(":")
        if divisor:
            attributes[(index,)] = [["tt.divisibility", int(divisor)]]
    kernel = triton.compile(
        ASTSource(variant.function, signature, dict(variant.constexprs), attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            **variant.options,
        },
    )
    registers, spill_bytes = _resources(kernel.asm["ptx"], architecture)
    instruction = ""
    if variant.expects:
        found = re.search(variant.expects, _disassembled(kernel.asm["cubin"]))
        instruction = found[0] if found else ""
    shared = int(kernel.metadata.shared)
    return Compiled(variant, architecture, registers, spill_bytes, shared, instruction)


def _resources(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers and spilled bytes a thread, as the assembler tells them. Triton keeps its words to
    itself, so it is asked again.
    """
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        # As Triton calls it, but for the debug information.
        command = [get_ptxas(architecture).path, "-v", "--regAllocOptLevel=2"]
        done = subprocess.run(  # noqa: S603
            [*command, f"--gpu-name={target[1]}", str(source), "-o", str(source.with_suffix(".o"))],
            capture_output=True,
            text=True,
            check=True,
        )
    used = re.search(r"Used (\d+) registers", done.stderr)
    assert used is not None, done.stderr
    return int(used[1]), sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))


def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(  # noqa: S603
            [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def table(compiled: Iterable[Compiled]) -> str:
    """Markdown: a line a variant, a column an architecture."""
    lines: dict[tuple[str, str], dict[int, Compiled]] = {}
    for one in compiled:
        lines.setdefault((one.variant.kernel, one.variant.name), {})[one.architecture] = one
    heads = ["kernel", "variant", *(f"sm_{arch}" for arch in ARCHITECTURES), "instruction on sm_90"]
    out = [_line(heads), _line("---" for _ in heads)]
    for (kernel, name), columns in sorted(lines.items(), key=_module_of):
        cells = [_cell(columns.get(arch)) for arch in ARCHITECTURES]
        on_hopper = columns.get(90)
        instruction = f"`{on_hopper.instruction}`" if on_hopper and on_hopper.instruction else ""
        out.append(_line([f"`{kernel}`", name, *cells, instruction]))
    return "\n".join(out) + "\n"


def _module_of(line: tuple[tuple[str, str], object]) -> int:
    """A kernel that old architectures lack stands with its module's others all the same."""
    return KERNEL_MODULES.index(line[0][0].partition(".")[0])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(one: Compiled | None) -> str:
    """Registers, shared memory in KiB, warps and stages; spills if any."""
    if one is None:
        return "-"
    spills = f", **{one.spill_bytes} B spilled**" if one.spill_bytes else ""
    launch = f"{one.variant.num_warps}w {one.variant.num_stages}s"
    return f"{one.registers} / {one.shared_bytes / 1024:.0f} / {launch}{spills}"


def write_table(document: Path, text: str) -> None:
    """Put ``text`` between the markers. Raises ``ValueError`` unless each is there once."""
    before, found, rest = document.read_text().partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end or END in after or BEGIN in rest:
        raise ValueError(f"{document} needs one line {BEGIN!r} and after it one line {END!r}")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ep_kernels.triton.aot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES, action="append")
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("document", nargs="?", type=Path, help="Markdown file with the markers")
    options = parser.parse_args(arguments)
    if options.document and (options.arch or options.only):
        parser.error("a document gets the whole table: leave out --arch and --only")
    compiled = []
    for arch in options.arch or ARCHITECTURES:
        for variant in variants(arch):
            if options.only in variant.kernel:
                one = compile_variant(variant, arch)
                compiled.append(one)
                for fault in one.faults():
                    print(f"sm_{arch} {variant.full_name} {fault}", file=sys.stderr)
    print(table(compiled), end="")
    if not compiled:
        parser.error(f"no kernel is called {options.only!r}")
    if options.document:
        write_table(options.document, table(compiled))
    return int(any(one.faults() for one in compiled))


if __name__ == "__main__":
    sys.exit(main())
