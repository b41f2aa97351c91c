"""Typed ZeroMQ links for asyncio. The only package that imports zmq.

API (all calls on the event loop's thread; ``Net`` is made once per process)
    ``Net(security, id, role)``                 owns the ZeroMQ context; ``close()`` last
    ``ServerLink[In, Out](net, address, receives=In)``    ROUTER, binds
        ``await recv() -> (peer, In)``; ``send(peer, Out) -> bool``; ``on_lost(peer)`` callback
    ``ClientLink[In, Out](net, address, receives=In)``    DEALER, connects, reconnects by itself
        ``await recv() -> In``; ``send(Out) -> bool``; ``up``; ``await wait_up()``;
        ``on_up()`` / ``on_down()`` callbacks
    ``Publisher[Out](net, address)``            ``send(Out)``
    ``Subscriber[In](net, address, receives=In)``   ``await recv() -> In``, only the newest
    ``await request(net, address, message, receives=U, want=T) -> T``   one question, one answer
    ``new_key_pair() -> (public, secret)``      for CURVE, in ZeroMQ's text form

``peer`` is the ROUTER's name for one *connection*: a client that reconnects, or restarts, is
another peer. A message sent on a lost connection is never delivered late.

Bounds. ``send`` never waits: it returns False, and the message is dropped and counted, when the
peer is not connected or ``SEND_QUEUE`` messages are unsent; the caller decides what that means.
Received messages wait in a queue of ``receive_queue``; when it is full the link stops reading, so
that the peer's own queue fills and its ``send`` returns False.

Bytes that cannot be decoded are counted, logged (1st, 2nd, 4th, 8th ... time) and dropped: a
corrupt peer must not end a service. ``counters`` has the figures.

Trust. ``ipc://`` is guarded by the mode of its file. Every ``tcp://`` socket uses CURVE where keys
are configured (``mesh.curve``): a peer whose key is not listed does not get past the handshake, and
a message that its role may not send (``mesh.authority``) is counted as refused and dropped. Without
keys TCP does not leave the machine unless ``security.allow_insecure`` says so.

Layers, each importing only those above it:

    net          context, sockets in the event loop, their guard
    commands     ServerLink, ClientLink, request
    broadcasts   Publisher, Subscriber
"""

from mesh.inbox import Counters, LinkClosed, LinkError
from mesh.links.broadcasts import Publisher, Subscriber
from mesh.links.commands import ClientLink, ServerLink, request
from mesh.links.net import SEND_QUEUE, Net, new_key_pair

__all__ = [
    "SEND_QUEUE",
    "ClientLink",
    "Counters",
    "LinkClosed",
    "LinkError",
    "Net",
    "Publisher",
    "ServerLink",
    "Subscriber",
    "new_key_pair",
    "request",
]
