"""The ``shm`` plane: lanes between processes of one host, in shared memory.

A lane is one memfd that both ends map: nothing has a name, so nothing outlives its processes.
Layers, each importing only those above it:

    memory      memfds: allocate, seal, check, map
    doorbell    the futex word on which a process sleeps until any of its peers rings
    layout      where everything lies in a lane, and whether it fits
    lane        one lane's ring slots as ready-made views, shared by both ends
    handshake   the messages that pass memory from a router to an expert worker
    watcher     the thread that accepts peers and notices their death
    router      ``ShmRouterPlane``
    expert      ``ShmExpertPlane``
"""

from ep_kernels.shm.expert import ShmExpertPlane
from ep_kernels.shm.router import ShmRouterPlane

__all__ = ["ShmExpertPlane", "ShmRouterPlane"]
