"""Anonymous shared memory: memfds that are allocated, sealed at their size and pre-faulted."""

from __future__ import annotations

import fcntl
import mmap
import os

from ep_kernels.plane import PlaneError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create(name: str, size_bytes: int) -> int:
    """A memfd whose pages exist and whose size is final; ``name`` shows in ``/proc/PID/maps``.

    Raises ``PlaneError`` when the host has not that much memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Without it a shortage would show later, as SIGBUS at the first touch of a page.
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise PlaneError(f"cannot allocate {size_bytes} bytes for {name}: {error}") from error
    return fd


def attach(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a memfd and close ``fd``, which may come from a peer.

    Raises ``PlaneError`` when it has another size, or could be cut while it is mapped (reading
    beyond the end of a file kills the process).
    """
    try:
        actual = os.fstat(fd).st_size
        if actual != size_bytes:
            raise PlaneError(f"shared memory has {actual} bytes, expected {size_bytes}")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise PlaneError(f"shared memory is not a memfd: {error}") from error
        if seals & _SEALS != _SEALS:
            raise PlaneError("shared memory is not sealed against resizing")
        return mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
