"""On which CPUs the compute thread runs: ``expert.cpus``.

Left to itself, Linux often wakes several workers on the core of the router that they answer, beside
an idle one, and they take turns.
"""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from mesh.config import ConfigError
from mesh.cpus import ANY, AUTO, cpus_text, parse_cpus
from mesh.service import CannotServe


@dataclass(frozen=True, slots=True)
class Binding:
    """The CPUs that a thread is to keep to."""

    cpus: frozenset[int] = frozenset()
    """None: those of the process."""
    may_fail: bool = True
    """A worker does without it rather than not serve."""


def binding(choice: str, source: str, share: frozenset[int], usable: AbstractSet[int]) -> Binding:
    """What ``choice``, the value of ``expert.cpus`` from ``source``, means for a process that may
    use the CPUs ``usable`` and was given ``share`` by its launcher (empty: none). Pure.

    Raises ``CannotServe`` for chosen CPUs that it may not use.
    """
    if choice == ANY:
        return Binding()
    if choice == AUTO:
        return Binding(share)
    cpus = parse_cpus(choice)
    if beyond := cpus - usable:
        expected = (
            f"expected {AUTO}, {ANY}, or CPUs that this process may use: {cpus_text(usable)}, "
            f"not {cpus_text(beyond)}"
        )
        raise CannotServe(str(ConfigError("expert.cpus", choice, expected, source)))
    return Binding(cpus, may_fail=False)


def bind(chosen: Binding, log: FilteringBoundLogger) -> None:
    """Keep the calling thread, and threads that it starts, to the chosen CPUs; log where it runs.

    Raises ``CannotServe`` when it cannot, as CPUs may be taken away at any time, and must.
    """
    bound = False
    if chosen.cpus:
        try:
            os.sched_setaffinity(0, chosen.cpus)
            bound = True
        except OSError as error:
            reason = f"CPUs {cpus_text(chosen.cpus)}: {error.strerror}"
            if not chosen.may_fail:
                raise CannotServe(f"expert.cpus: {reason}") from error
            log.warning("compute.not_bound", reason=reason)
    log.info("compute.started", cpus=cpus_text(os.sched_getaffinity(0)), bound=bound)
