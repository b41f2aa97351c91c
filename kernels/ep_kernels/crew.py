"""Threads that help with products of large fp16 matrices (see ``ep_kernels.half``).

One crew a process. While work is shared its helpers take pieces of whatever product is under way;
they sleep once it is not, or when there has been none for about a millisecond. A product wakes them
and does not wait for those that come too late.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64
from typing import Any

from ep_kernels.native_library import load


class Crew:
    """Decides when the process's helpers work. One thread's."""

    __slots__ = ("_helpers", "_share", "_sharing")

    def __init__(self, helpers: int) -> None:
        """Have at least so many ``helpers`` from now on. With 0 nothing is ever shared."""
        library = load("half")
        self._helpers = helpers
        if helpers > 0:
            hire: Any = library.moemesh_crew_hire
            hire.restype = c_int64
            self._helpers = min(helpers, int(hire(c_int64(helpers))))
        self._share = library.moemesh_crew_share
        self._share.restype, self._share.argtypes = None, (c_int32,)
        self._sharing = False

    def share(self) -> None:
        """Let the helpers take part in every product from now on."""
        if self._helpers and not self._sharing:
            self._sharing = True
            self._share(1)

    def keep(self) -> None:
        """Have them leave their cores to others."""
        if self._sharing:
            self._sharing = False
            self._share(0)
