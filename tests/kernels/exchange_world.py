"""All ranks of an exchange in one process."""

from __future__ import annotations

import torch
from ep_kernels.triton.all_to_all.end import ExchangeShape, Peer
from ep_kernels.triton.all_to_all.exchange import ExpertExchange, RouterExchange
from ep_kernels.triton.all_to_all.inbox import Wire
from ep_kernels.triton.all_to_all.stream import ExpertStream, RouterStream
from ep_kernels.triton.all_to_all.symmetric import SymmetricBuffer

SHAPE = ExchangeShape(
    routers=2,
    experts=2,
    ring_slots=2,
    capacity_tokens=9,
    top_k=2,
    hidden=20,
    wire=Wire.FP32,
    back=Wire.FP32,
)
DEADLINE_S = 60.0
POISON = 0xA5


def buffer(nbytes: int, flags_bytes: int) -> SymmetricBuffer:
    """Memory whose data, but not whose flags, is poisoned."""
    data = torch.full((nbytes,), POISON, dtype=torch.uint8)
    data[:flags_bytes] = 0
    return SymmetricBuffer(data.data_ptr(), nbytes, data, None)


class World:
    """All ranks of an exchange, or of a stream, in this process."""

    def __init__(self, shape: ExchangeShape, *, deadline_s: float = DEADLINE_S) -> None:
        self.shape = shape
        self.deadline_s = deadline_s
        inboxes, counts = {}, {"router": shape.routers, "expert": shape.experts}
        for role, layout in (("router", shape.answers), ("expert", shape.requests)):
            inboxes[role] = [
                buffer(layout.total_bytes, layout.headers) for _ in range(counts[role])
            ]
        self.inboxes = inboxes

    def peers(self, role: str, me: int) -> list[Peer]:
        return [Peer(f"{role}{i}", box, me) for i, box in enumerate(self.inboxes[role])]

    def router(self, index: int) -> RouterExchange:
        inbox = self.inboxes["router"][index]
        return RouterExchange(self.shape, inbox, self.peers("expert", index), self.deadline_s)

    def expert(self, index: int) -> ExpertExchange:
        inbox = self.inboxes["expert"][index]
        return ExpertExchange(self.shape, inbox, self.peers("router", index), self.deadline_s)

    def router_stream(self, index: int, max_tokens: int) -> RouterStream:
        inbox, peers = self.inboxes["router"][index], self.peers("expert", index)
        return RouterStream(self.shape, inbox, peers, self.deadline_s, max_tokens)

    def expert_stream(self, index: int, max_tokens: int) -> ExpertStream:
        inbox, peers = self.inboxes["expert"][index], self.peers("router", index)
        return ExpertStream(self.shape, inbox, peers, self.deadline_s, max_tokens)
