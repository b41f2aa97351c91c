"""The ``group`` planes, ``gloo`` and ``nccl``: lanes over torch.distributed's process groups.

A lane opens as one over TCP does, and keeps that connection: it carries heads, pairs and beats.
What is large, activations and answers, goes through two groups of two ranks, one for each
direction, made for this lane alone. A receive is posted only when the head of its message has come:
so its size is known, nothing waits on a group that has nothing to say, and one thread sleeps on all
lanes at once (docs/adr/0010-process-groups-behind-the-lane-handshake.md). Layers, each importing
only those above:

    backend     gloo and NCCL: is it there, make a group, finish a receive, give a group up
    rendezvous  the store by which a lane's two ends find each other's groups
    memory      a lane whose rows lie in buffers of the back end's device
    carrier     one lane's messages: heads on the connection, rows through the groups
    router      ``GroupRouterPlane``
    expert      ``GroupExpertPlane``
"""

from ep_kernels.group.backend import Backend, GlooBackend, NcclBackend
from ep_kernels.group.expert import GroupExpertPlane
from ep_kernels.group.router import GroupRouterPlane

__all__ = ["Backend", "GlooBackend", "GroupExpertPlane", "GroupRouterPlane", "NcclBackend"]
