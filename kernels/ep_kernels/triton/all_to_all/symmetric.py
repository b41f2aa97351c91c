"""Memory that another process's kernels write into: a ``SymmetricBuffer`` and who allocates it.

On one host's CPU it is a memfd, passed over a Unix socket or inherited; nothing of it is left when
its processes are gone. On GPUs it is torch's symmetric memory (all ranks of a group, over NVLink)
or, between processes of one card, CUDA IPC. Kernels get addresses only. A buffer starts as zeros,
and belongs to one incarnation of its owner: a late writer of an older one writes into memory that
nobody reads.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch

from ep_kernels.shm import memory


@dataclass(frozen=True, slots=True)
class SymmetricBuffer:
    """``owner`` keeps the mapping alive; hold the buffer as long as a kernel may use an address.

    ``address`` is where this process sees the memory, whoever allocated it.
    """

    address: int
    nbytes: int
    bytes: torch.Tensor
    """``[nbytes]`` uint8 view."""
    owner: Any

    def view(self, offset: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The ``shape`` values of ``dtype`` that begin at byte ``offset``."""
        count = 1
        for size in shape:
            count *= size
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


def create_shared(name: str, nbytes: int) -> tuple[SymmetricBuffer, int]:
    """Host memory and the memfd that another process attaches it by; the caller closes that.

    Raises ``PlaneError`` when the host has not that much memory.
    """
    fd = memory.create(name, nbytes)
    return attach_shared(os.dup(fd), nbytes), fd


def attach_shared(fd: int, nbytes: int) -> SymmetricBuffer:
    """Map a peer's memory; takes over ``fd``. Raises ``PlaneError`` when it is not that buffer."""
    return over_mapping(memory.attach(fd, nbytes))


def over_mapping(mapping: mmap.mmap) -> SymmetricBuffer:
    data = torch.frombuffer(mapping, dtype=torch.uint8)
    return SymmetricBuffer(data.data_ptr(), data.numel(), data, mapping)


def create_cuda(nbytes: int, device: torch.device) -> tuple[SymmetricBuffer, tuple[Any, ...]]:
    """Device memory and what ``attach_cuda`` in another process of this host opens it by.

    The second value can be pickled; the buffer must outlive every process that attached it.
    """
    data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    storage: Any = data.untyped_storage()
    handle = storage._share_cuda_()  # torch has no public name for it
    return SymmetricBuffer(data.data_ptr(), nbytes, data, data), (handle, data.storage_offset())


def attach_cuda(shared: tuple[Any, ...], nbytes: int) -> SymmetricBuffer:
    """Open device memory of another process."""
    handle, offset = shared
    storage = torch.UntypedStorage._new_shared_cuda(*handle)  # noqa: SLF001 - as above
    data = torch.empty(0, dtype=torch.uint8, device=storage.device)
    data.set_(storage, int(offset), (nbytes,), (1,))
    return SymmetricBuffer(data.data_ptr(), nbytes, data, storage)


def create_group(nbytes: int, group: Any) -> list[SymmetricBuffer]:
    """One buffer a rank of ``group`` in torch's symmetric memory; ours is at our rank.

    Collective over the group, which is the union of both sides for one epoch of the membership.
    Peers' buffers have an address and no tensor of ours behind it.
    """
    from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 - GPU only

    data = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda"))
    data.zero_()
    handle = symmetric.rendezvous(data, group)
    torch.cuda.synchronize()
    handle.barrier()
    return [
        SymmetricBuffer(
            int(handle.buffer_ptrs[rank]),
            nbytes,
            data if rank == handle.rank else handle.get_buffer(rank, (nbytes,), torch.uint8),
            (data, handle),
        )
        for rank in range(handle.world_size)
    ]
