"""Memory that torch did not allocate, and the structures in which the driver is asked for such."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ep_kernels.plane import PlaneError
from ep_kernels.triton.cuda_shared import (
    AccessDescription,
    AllocationProperties,
    CudaShared,
    Location,
)
from ep_kernels.triton.foreign import tensor_at

CPU = torch.device("cpu")


def test_the_memory_is_let_go_once_when_no_view_of_it_is_left() -> None:
    memory, released = ctypes.create_string_buffer(bytes(range(64)), 64), []
    address = ctypes.addressof(memory)
    tensor = tensor_at(address, 64, CPU, lambda: released.append(address))
    assert (tensor.dtype, tensor.data_ptr(), tuple(tensor.shape)) == (torch.uint8, address, (64,))
    view = tensor[8:24].view(torch.int64)
    assert view[0].item() == int.from_bytes(bytes(range(8, 16)), "little")
    view.fill_(-1)
    assert memory.raw[7:25] == b"\x07" + b"\xff" * 16 + b"\x18"
    del tensor
    gc.collect()
    assert released == []
    other = tensor_at(address, 64, CPU, lambda: released.append(0))
    del view
    gc.collect()
    assert released == [address]
    del other
    gc.collect()
    assert released == [address, 0]


def test_structures_lie_as_in_the_drivers_header(tmp_path: Path) -> None:
    """Triton ships the header."""
    triton = pytest.importorskip("triton")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    wanted = {
        "CUmemLocation": Location,
        "CUmemAllocationProp": AllocationProperties,
        "CUmemAccessDesc": AccessDescription,
    }
    lines = [
        f'printf("{name} %zu{" %zu" * len(kind._fields_)}\\n", sizeof({name})'
        + "".join(f", offsetof({name}, {field[0]})" for field in kind._fields_)
        + ");"
        for name, kind in wanted.items()
    ]
    constants = (
        "CU_MEM_ALLOCATION_TYPE_PINNED", "CU_MEM_LOCATION_TYPE_DEVICE",
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
        "CU_MEM_ALLOC_GRANULARITY_MINIMUM", "(int)sizeof(CUmemGenericAllocationHandle)",
        "(int)sizeof(CUdeviceptr)",
    )  # fmt: skip
    lines.append(f'printf("{" %d" * len(constants)}\\n", {", ".join(constants)});')
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <cuda.h>\n"
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n"
    )
    subprocess.run([compiler, "-I", include, "-o", program, source], check=True, timeout=60)
    told = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60)
    *structures, numbers = told.stdout.splitlines()
    assert structures == [
        " ".join(
            str(part)
            for part in (
                name,
                ctypes.sizeof(kind),
                *(getattr(kind, field[0]).offset for field in kind._fields_),
            )
        )
        for name, kind in wanted.items()
    ]
    assert numbers.split() == ["1", "1", "1", "3", "0", "8", "8"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for GPUs may have the driver")
def test_a_machine_without_the_driver_is_told_so() -> None:
    with pytest.raises(PlaneError, match="CUDA's driver cannot share memory: libcuda"):
        CudaShared(torch.device("cuda", 0))
