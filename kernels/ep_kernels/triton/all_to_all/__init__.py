"""One-sided dispatch and combine between routers and expert ranks, over memory that both map.

A router and its expert ranks are disjoint sets of processes; no call spans more than one pair.
A token goes to a rank once, with its pairs. Layers, each importing only those above it:

    inbox       what lies where in the memory that peers write into
    symmetric   that memory, by allocator: memfd, CUDA IPC, torch's symmetric memory
    signals     flags: wait with a deadline, publish
    rounding    fp32 to the wire's formats
    reference   all of it in plain torch
    end         what both ends have
    plan        who gets which token: kernel
    put         rows, pairs, header and flag into the peers' inboxes: kernel
    arrive      what has come, indexed by expert: kernel
    answer      the experts' output back, as partial sums or exact rows: kernel
    combine     the answers added up: kernel
    drain       chunks of a long batch to where the whole belongs: kernel
    exchange    the low-latency mode: fixed capacity, no host synchronisation, capturable
    stream      the high-throughput mode: any number of tokens in chunks, exact counts
    ahead       what is compiled ahead of time
    traffic     launches and bytes of a step, counted, and the least there could be

In the low-latency mode a router's step is three launches (plan, put; combine) and an expert rank's
two (arrive, answer), however many peers there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_kernels.triton.registry import Variant


def variants(architecture: int) -> tuple[Variant, ...]:
    """For ``registry``: this package's kernels, of which none is imported before."""
    from ep_kernels.triton.all_to_all import ahead  # noqa: PLC0415

    return ahead.variants(architecture)
