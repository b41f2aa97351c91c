"""Compiling kernels for a GPU that is not there. (Only this process may: see ``interpreted``.)"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from ep_kernels.triton import aot, registry, tuning
from ep_kernels.triton.registry import Variant

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.fixture(autouse=True)
def compile_afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not what an earlier run left in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def variant(kernel: str, name: str, architecture: int = 90) -> Variant:
    (found,) = (
        one for one in registry.variants(architecture) if (one.kernel, one.name) == (kernel, name)
    )
    return found


def test_the_documents_table_lists_the_registered_kernels_and_only_those() -> None:
    text = DOCUMENT.read_text().partition(aot.BEGIN)[2].partition(aot.END)[0]
    listed = [re.findall(r"[^|]+", line)[:5] for line in text.strip().splitlines()[2:]]
    found = {
        (kernel.strip(" `"), name.strip()): [cell.strip() != "-" for cell in cells]
        for kernel, name, *cells in listed
    }
    registered: dict[tuple[str, str], list[bool]] = {}
    for column, arch in enumerate(tuning.ARCHITECTURES):
        for one in registry.variants(arch):
            columns = registered.setdefault((one.kernel, one.name), [False, False, False])
            assert not columns[column], f"{one.full_name} is registered twice"
            columns[column] = True
    assert found == registered, "run make kernels-aot"
    assert len(listed) == len(found)
    assert "spilled" not in text


def test_every_kernel_module_is_registered() -> None:
    folder = Path(registry.__file__).parent
    with_variants = set()
    for path in folder.rglob("*.py"):
        if re.search(r"^def variants\(", path.read_text(), re.MULTILINE):
            module = path.relative_to(folder).parts[0].removesuffix(".py")  # or its package
            with_variants.add(module)
    assert with_variants - {"registry"} == set(registry.KERNEL_MODULES)


def test_every_kernel_has_tiles_for_every_architecture() -> None:
    for kernel, tiles in tuning.TABLE.items():
        wanted = set(tuning.FP8_ARCHITECTURES if "fp8" in kernel else tuning.ARCHITECTURES)
        assert set(tiles) == wanted | {tuning.INTERPRETED}, kernel


def test_fp8_products_run_on_hoppers_matrix_unit_without_spills() -> None:
    compiled = aot.compile_variant(variant("grouped_gemm.gate_up", "FP8 decode"), 90)
    assert compiled.instruction.startswith("QGMMA")
    assert compiled.faults() == []
    assert 0 < compiled.registers < 256
    assert compiled.shared_bytes > 0


def test_spills_and_missing_instructions_are_faults() -> None:
    scan = variant("counting.sum_before", "256 groups")
    assert aot.compile_variant(scan, 90).faults() == []
    starved = aot.compile_variant(replace(scan, options={"maxnreg": 24}), 90)
    assert starved.registers <= 24
    assert starved.spill_bytes > 0
    assert any("spills" in fault for fault in starved.faults())
    cold = aot.compile_variant(replace(scan, options={"maxnreg": 24}, hot=False), 90)
    assert cold.faults() == []
    wrong = aot.compile_variant(replace(scan, expects="QGMMA"), 90)
    assert any("QGMMA" in fault for fault in wrong.faults())
    greedy = replace(starved, spill_bytes=0, shared_bytes=aot.SHARED_BYTES[90] + 1)
    assert any("shared memory" in fault for fault in greedy.faults())


def test_the_table_goes_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    document = tmp_path / "kernels.md"
    document.write_text(f"before\n{aot.BEGIN}\nold\n{aot.END}\nafter\n")
    for _ in range(2):
        aot.write_table(document, "| new |\n")
        expected = f"before\n{aot.BEGIN}\n\n| new |\n\n{aot.END}\nafter\n"
        assert document.read_text() == expected
    document.write_text("no markers")
    with pytest.raises(ValueError, match="needs one line"):
        aot.write_table(document, "")


def test_the_command_exits_1_for_a_fault_and_refuses_half_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    starved = replace(variant("counting.sum_before", "256 groups"), options={"maxnreg": 24})
    monkeypatch.setattr(aot, "variants", lambda _: (starved,))
    assert aot.main(["--arch", "90"]) == 1
    assert "counting.sum_before [256 groups] spills" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main(["--arch", "90", str(tmp_path / "kernels.md")])


def test_a_device_without_tiles_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    capability = (7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with pytest.raises(tuning.UnsupportedArchitecture, match=r"sm_75.*sm_80, sm_90, sm_100"):
        tuning.architecture_of(torch.device("cuda"))
    capability = (10, 3)
    assert tuning.architecture_of(torch.device("cuda")) == 100
    with pytest.raises(tuning.UnsupportedArchitecture, match="device 'meta'"):
        tuning.architecture_of(torch.device("meta"))


def test_fp8_is_refused_where_the_matrix_unit_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert tuning.architecture_of(torch.device("cuda")) == 80
    with pytest.raises(tuning.UnsupportedArchitecture, match="FP8 on sm_80; accepted are sm_90"):
        tuning.fp8_architecture_of(torch.device("cuda"))
