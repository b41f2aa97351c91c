"""What a step of the low-latency exchange costs on the wire, and the least it could.

    python -m ep_kernels.triton.all_to_all.traffic

prints the table of ``docs/kernels.md``. The numbers follow from the kernels' code: a test counts
what they store into other ranks' memory, byte by byte, and the launches, and finds these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ep_kernels.triton.all_to_all.end import ExchangeShape
from ep_kernels.triton.all_to_all.inbox import InboxLayout, Wire

ROUTER_LAUNCHES: Final = 3
"""Of a batch, whatever the number of expert ranks: plan, put, combine."""
EXPERT_LAUNCHES: Final = 2
"""Of what is served together, whatever the number of routers: arrive, answer."""

_WORD_BYTES: Final = 8
_REQUEST_WORDS: Final = 11 + 1
"""Of the header, and the flag."""
_ANSWER_WORDS: Final = 3 + 2
"""Of the header, the flag, and the one that gives the request's ring slot back."""
_PAIR_BYTES: Final = 16
_BEGIN_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Message:
    """One lane's part of a batch: tokens that go there, each once, and their pairs."""

    rows: int
    pairs: int


def request_bytes(shape: ExchangeShape, message: Message) -> int:
    """What a router writes into one expert rank's memory."""
    begins = _BEGIN_BYTES * (message.rows + 1)
    pairs = _PAIR_BYTES * message.pairs
    return message.rows * _row_bytes(shape.requests) + begins + pairs + _WORD_BYTES * _REQUEST_WORDS


def answer_bytes(shape: ExchangeShape, message: Message) -> int:
    """What an expert rank writes into a router's memory."""
    rows = message.pairs if shape.exact else message.rows
    return rows * _row_bytes(shape.answers) + _WORD_BYTES * _ANSWER_WORDS


def least_bytes(hidden: int, value_bytes: int, messages: list[Message]) -> int:
    """Tokens x distinct ranks x hidden x bytes of a value: one way, and nothing but the values."""
    return sum(message.rows for message in messages) * hidden * value_bytes


def mean_ranks(top_k: int, ranks: int) -> float:
    """Distinct ranks of a token whose experts are spread evenly and at random."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def _row_bytes(layout: InboxLayout) -> int:
    return layout.row_bytes + layout.scale_row_bytes


def table(tokens: int = 128, hidden: int = 7168, top_k: int = 8) -> str:
    """Markdown: a batch of ``tokens`` over 8 to 64 expert ranks, random routing."""
    lines = [
        "| expert ranks | way | ranks a token | bytes a token | least | over it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    kinds = (
        ("out, FP8", Wire.FP8, Wire.BF16, False),
        ("out, bf16", Wire.BF16, Wire.BF16, False),
        ("back, bf16 sums", Wire.FP8, Wire.BF16, False),
        ("back, exact fp32 rows", Wire.FP32, Wire.FP32, True),
    )
    for ranks in (8, 32, 64):
        distinct = mean_ranks(top_k, ranks)
        message = Message(round(tokens * distinct / ranks), round(tokens * top_k / ranks))
        for way, wire, back, exact in kinds:
            shape = ExchangeShape(1, ranks, 2, tokens, top_k, hidden, wire, back, exact)
            out = way.startswith("out")
            moved = ranks * (request_bytes if out else answer_bytes)(shape, message)
            value_bytes = (wire if out else back).value_bytes
            least = least_bytes(hidden, value_bytes, [message] * ranks)
            lines.append(
                f"| {ranks} | {way} | {distinct:.2f} | {moved / tokens:,.0f} | "
                f"{least / tokens:,.0f} | {100 * (moved / least - 1):.1f} % |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
