"""Memory that torch did not allocate, and how CUDA's driver is asked for such."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ep_kernels.plane import PlaneError
from ep_kernels.shm import memory
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


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """CUDA's driver by its own header, which Triton ships, with memfds for a device's memory."""
    triton = pytest.importorskip("triton")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).with_name("vmm_driver.c")
    options = ["-shared", "-fPIC", "-Wall", "-Werror", "-I", str(include)]
    subprocess.run([compiler, *options, "-o", library, source], check=True, timeout=60)
    return ctypes.CDLL(str(library))


@pytest.fixture
def shared(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> CudaShared:
    monkeypatch.setattr("ep_kernels.triton.cuda_shared.LIBRARY", driver._name)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    driver.vmm_fail(b"")
    return CudaShared(CPU)


def left() -> tuple[int, int]:
    """Descriptors and mappings of device memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:vmm")


def test_what_one_maps_the_other_sees_and_nothing_is_left_of_it(
    shared: CudaShared, driver: ctypes.CDLL
) -> None:
    before = left()
    ours, fd = shared.create(100_000)
    assert driver.vmm_handles() == 0
    assert ours.bytes.numel() == 100_000
    assert not ours.bytes.any()
    theirs = shared.attach(os.dup(fd), 100_000)
    os.close(fd)
    assert driver.vmm_handles() == 0
    assert ours.address != theirs.address
    row = ours.view(640, torch.float32, 3, 5)
    row.copy_(torch.arange(15).view(3, 5))
    del ours
    gc.collect()
    assert torch.equal(theirs.view(640, torch.float32, 3, 5), row)
    assert left() == (before[0], before[1] + 2)
    del row, theirs
    assert left() == before


@pytest.mark.parametrize(
    "name",
    [
        "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
    ],
)  # fmt: skip
def test_a_call_that_fails_is_named_and_leaves_nothing(
    name: str, shared: CudaShared, driver: ctypes.CDLL
) -> None:
    before = left()
    driver.vmm_fail(name.encode())
    with pytest.raises(PlaneError, match=rf"{name}: invalid argument \(1\)"):
        shared.create(1000)
    assert (driver.vmm_handles(), left()) == (0, before)


@pytest.mark.parametrize("name", ["cuMemImportFromShareableHandle", "cuMemMap"])
def test_memory_that_cannot_be_attached_is_refused_and_its_descriptor_closed(
    name: str, shared: CudaShared, driver: ctypes.CDLL
) -> None:
    ours, fd = shared.create(1000)
    before = left()
    driver.vmm_fail(name.encode())
    with pytest.raises(PlaneError, match=name):
        shared.attach(os.dup(fd), 1000)
    driver.vmm_fail(b"")
    with pytest.raises(PlaneError, match="cuMemMap"):
        shared.attach(os.dup(fd), ours.nbytes + (1 << 20))  # larger than it is
    assert (driver.vmm_handles(), left()) == (0, before)
    os.close(fd)


def memfds() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:window")


def test_host_memory_has_an_address_on_the_device_as_long_as_it_is_held(
    shared: CudaShared,
) -> None:
    mapping = memory.attach(memory.create("window", 5000), 5000)
    window = shared.window(mapping)
    assert memfds() == 2
    mapping[4096:4100] = b"here"
    assert ctypes.string_at(window.address + 4096, 4) == b"here"
    with pytest.raises(PlaneError, match="cuMemHostRegister"):
        shared.window(mapping)
    del mapping
    assert ctypes.string_at(window.address + 4096, 4) == b"here"
    del window
    assert memfds() == 0


@pytest.mark.parametrize("name", ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"])
def test_host_memory_that_the_device_does_not_get_is_left_as_it_was(
    name: str, shared: CudaShared, driver: ctypes.CDLL
) -> None:
    mapping = memory.attach(memory.create("window", 5000), 5000)
    driver.vmm_fail(name.encode())
    with pytest.raises(PlaneError, match=rf"{name}: invalid argument \(1\)"):
        shared.window(mapping)
    assert memfds() == 1


def test_structures_are_as_large_as_the_drivers(driver: ctypes.CDLL) -> None:
    """Their fields are looked at by each call above."""
    structures = (Location, AllocationProperties, AccessDescription)
    sizes = (ctypes.c_size_t * 3)()
    driver.vmm_sizes(sizes)
    assert [ctypes.sizeof(one) for one in structures] == list(sizes)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for GPUs may have the driver")
def test_a_machine_without_the_driver_is_told_so() -> None:
    with pytest.raises(PlaneError, match="CUDA's driver cannot share memory: libcuda"):
        CudaShared(torch.device("cuda", 0))
