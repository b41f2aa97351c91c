"""The ``tcp`` plane: lanes between processes of different hosts.

Each end keeps the memory of a whole ``shm`` lane for itself, and a *carrier* copies every message
from one to the other: where shared memory would let the peer see a flag, the carrier's thread sets
it once all that it stands for has arrived. So everything above a lane (rings, checks, order) is the
``shm`` plane's own, and one plane holds lanes of both kinds at once. Layers, each importing only
those above it:

    handshake   addresses, and the messages that open a lane between two ends that share a secret
    carrier     one lane's messages as frames on a connection; notices a silent peer
    dial        opens a lane in the background, however long the network takes
    router      ``TcpRouterPlane``
    expert      ``TcpExpertPlane``
"""

from ep_kernels.tcp.expert import TcpExpertPlane
from ep_kernels.tcp.router import TcpRouterPlane

__all__ = ["TcpExpertPlane", "TcpRouterPlane"]
