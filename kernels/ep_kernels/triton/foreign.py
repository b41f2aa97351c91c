"""Memory that torch did not allocate, as a tensor that says when nobody refers to it any more.

torch takes such memory by DLPack (``ATen/dlpack.h``), which names the device that the tensor is to
belong to. That may be another one than the memory lies on, as long as the device reaches it there.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any, Final

import torch

_TYPES: Final = {"cpu": 1, "cuda": 2}
_UNSIGNED: Final = 1
_NAME: Final = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

_held: dict[int, tuple[_Tensor, Any, Callable[[], None]]] = {}
"""What C has the addresses of, by the number in ``manager_ctx``."""
_numbers: Final = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.POINTER(_Tensor))
def _let_go(tensor: Any) -> None:
    *_, release = _held.pop(tensor.contents.manager_ctx)
    release()


def tensor_at(
    address: int, nbytes: int, device: torch.device, release: Callable[[], None]
) -> torch.Tensor:
    """``[nbytes]`` uint8 at ``address``, which kernels of ``device`` can use. ``release`` is called
    once, on any thread, when neither the tensor nor a view of it is referred to; work that was
    queued before may still use the memory then. It must not raise.
    """
    shape = (ctypes.c_int64 * 1)(nbytes)
    number = next(_numbers)
    tensor = _Tensor(
        data=address,
        device_type=_TYPES[device.type],
        device_id=device.index or 0,
        ndim=1,
        type_code=_UNSIGNED,
        bits=8,
        lanes=1,
        shape=shape,
        manager_ctx=number,
        deleter=ctypes.cast(_let_go, ctypes.c_void_p),
    )
    _held[number] = (tensor, shape, release)
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(
        _capsule(ctypes.addressof(tensor), _NAME, None)
    )
    return found
