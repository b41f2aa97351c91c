"""Device memory that processes of one host share, by CUDA's virtual memory management; and their
shared host memory, for devices.

An allocation is exported as a file descriptor, travels over a Unix socket as a memfd does, and is
freed when nobody maps it any more. So nothing of it has a name, nothing stays behind when a process
is killed, and who writes into the memory of a dead peer harms nobody. torch's own way to share
(``all_to_all.symmetric.create_cuda``) promises neither: its memory must outlive whoever opened it.

The driver's library is called by hand, as torch has no interface to it; the structures are those of
``cuda.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from ep_kernels.plane import PlaneError
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer
from ep_kernels.triton.foreign import tensor_at

_log = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"

_PINNED: Final = 1
_DEVICE: Final = 1
_AS_FD: Final = 1
_READ_WRITE: Final = 3
_MAPPED: Final = 2
"""``CU_MEMHOSTREGISTER_DEVICEMAP``"""


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


_SIZE, _FLAGS, _POINTER = ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_void_p
_ADDRESS = _HANDLE = ctypes.c_ulonglong

_FUNCTIONS: Final = {
    "cuGetErrorString": (ctypes.c_int, _POINTER),
    "cuMemGetAllocationGranularity": (_POINTER, _POINTER, ctypes.c_int),
    "cuMemCreate": (_POINTER, _SIZE, _POINTER, _FLAGS),
    "cuMemExportToShareableHandle": (_POINTER, _HANDLE, ctypes.c_int, _FLAGS),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, ctypes.c_int),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemRelease": (_HANDLE,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
    "cuMemHostGetDevicePointer_v2": (_POINTER, _POINTER, ctypes.c_uint),
    "cuMemHostUnregister": (_POINTER,),
}


class _Driver:
    """``libcuda``. Raises ``PlaneError`` where it is not there or lacks a function."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype = ctypes.c_int
                function.argtypes = arguments
        except (OSError, AttributeError) as error:
            raise PlaneError(f"CUDA's driver cannot share memory: {error}") from error

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises ``PlaneError`` with what CUDA says."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            said = (text.value or b"unknown").decode(errors="replace")
            raise PlaneError(f"{name}: {said} ({code})")


class CudaShared:
    """Memory of the GPU ``device`` for others, and others' memory for it. Any thread.

    A peer on another GPU of this host must be one that ``device`` reaches (peer access), and both
    processes must see both GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises ``PlaneError``."""
        self._device = device
        self._driver = _Driver()
        self._location = Location(_DEVICE, device.index or 0)

    def create(self, nbytes: int) -> tuple[SymmetricBuffer, int]:
        """Zeros, and the descriptor that another process attaches them by; the caller closes that.
        Raises ``PlaneError``.
        """
        self._enter()
        properties = self._properties()
        handle, fd = _HANDLE(), ctypes.c_int(-1)
        size = self._size(nbytes, properties)
        self._driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0)
        try:
            self._driver("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _AS_FD, 0)
            buffer = self._map(handle, nbytes, size)
        except PlaneError:
            if fd.value >= 0:
                os.close(fd.value)
            raise
        finally:
            self._driver("cuMemRelease", handle)  # what is mapped stays
        buffer.bytes.zero_()
        torch.cuda.synchronize(self._device)
        return buffer, fd.value

    def attach(self, fd: int, nbytes: int) -> SymmetricBuffer:
        """Map a peer's memory; takes over ``fd``. Raises ``PlaneError`` when that is no such
        memory, smaller, or out of this device's reach.
        """
        self._enter()
        handle = _HANDLE()
        try:
            self._driver("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _AS_FD)
        finally:
            os.close(fd)
        try:
            return self._map(handle, nbytes, self._size(nbytes, self._properties()))
        finally:
            self._driver("cuMemRelease", handle)

    def window(self, mapping: mmap.mmap) -> CudaWindow:
        """Host memory that is shared with another process, as the device addresses it. Raises
        ``PlaneError`` where it cannot be pinned.
        """
        self._enter()
        return CudaWindow(self._driver, self._device, mapping)

    def _enter(self) -> None:
        """Have the device's context on this thread, as the driver's functions want it."""
        torch.cuda.synchronize(self._device)

    def _properties(self) -> AllocationProperties:
        return AllocationProperties(_PINNED, _AS_FD, self._location)

    def _size(self, nbytes: int, properties: AllocationProperties) -> int:
        """``nbytes`` in whole pages of the device."""
        page = _SIZE()
        self._driver(
            "cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), 0
        )
        return -(-nbytes // page.value) * page.value

    def _map(self, handle: ctypes.c_ulonglong, nbytes: int, size: int) -> SymmetricBuffer:
        driver, address = self._driver, _ADDRESS()
        driver("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        with contextlib.ExitStack() as undo:
            undo.callback(driver, "cuMemAddressFree", address, size)
            driver("cuMemMap", address, size, 0, handle, 0)
            undo.callback(driver, "cuMemUnmap", address, size)
            access = AccessDescription(self._location, _READ_WRITE)
            driver("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            undo.pop_all()
        release = _Release(driver, self._device, address.value, size)
        data = tensor_at(address.value, nbytes, self._device, release)
        return SymmetricBuffer(address.value, nbytes, data, None)


class CudaWindow:
    """A mapping that is pinned, and addressed by a device, until nobody refers to this and what was
    queued has ended.
    """

    def __init__(
        self, driver: Callable[..., None], device: torch.device, mapping: mmap.mmap
    ) -> None:
        """Raises ``PlaneError``."""
        host = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        size = -(-len(mapping) // mmap.PAGESIZE) * mmap.PAGESIZE
        driver("cuMemHostRegister_v2", host, size, _MAPPED)
        address = _ADDRESS()
        try:
            driver("cuMemHostGetDevicePointer_v2", ctypes.byref(address), host, 0)
        except PlaneError:
            driver("cuMemHostUnregister", host)
            raise
        self.address = address.value
        weakref.finalize(self, _unpin, driver, device, host, mapping)


def _unpin(
    driver: Callable[..., None], device: torch.device, host: int, mapping: mmap.mmap
) -> None:
    try:
        torch.cuda.synchronize(device)
        driver("cuMemHostUnregister", host)
    except (PlaneError, RuntimeError):
        _log.exception("lane.memory_kept")
    del mapping  # not unmapped before


class _Release:
    """Unmaps memory once what was queued has ended."""

    def __init__(
        self, driver: Callable[..., None], device: torch.device, address: int, size: int
    ) -> None:
        self._driver = driver
        self._device = device
        self._address = address
        self._size = size

    def __call__(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
            self._driver("cuMemUnmap", self._address, self._size)
            self._driver("cuMemAddressFree", self._address, self._size)
        except (PlaneError, RuntimeError):
            _log.exception("lane.memory_kept")
