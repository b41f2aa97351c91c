"""What a peer that the tests make by hand says on its lane."""

from __future__ import annotations

from struct import Struct
from typing import Any

from ep_kernels.shm.handshake import Offer
from lane_peer import CAPACITY, DIGEST, HIDDEN, RING, TOP_K

FRAME = Struct("=HHI7q")
REQUEST, ANSWER, BEAT = 1, 2, 3


def an_offer(**changes: Any) -> Offer:
    """A router's, that the expert worker of a ``Pair`` takes."""
    values = {
        "router": "r9",
        "router_incarnation": 1,
        "expert": "e0",
        "expert_incarnation": 5,
        "digest": DIGEST,
        "sender": 0,
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "capacity_tokens": CAPACITY,
        "ring_slots": RING,
        "exact": False,
        "wire": "fp32",
    }
    return Offer(**(values | changes))
