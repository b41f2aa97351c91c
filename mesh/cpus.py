"""Lists of CPUs, and how the expert workers of one host divide them. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable

ANY = "any"
AUTO = "auto"
_RANGE = re.compile("([0-9]{1,4})(?:-([0-9]{1,4}))?")


def parse_cpus(text: str) -> frozenset[int]:
    """CPUs as ``taskset -c`` and systemd's CPUAffinity list them: numbers and ranges with commas or
    blanks between them, ``0-3,8``; at least one. Raises ``ValueError``.
    """
    cpus: set[int] = set()
    for item in re.split(r"\s*,\s*|\s+", text.strip()):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise ValueError(text)
        first, last = int(found[1]), int(found[2] or found[1])
        if first > last:
            raise ValueError(text)
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def cpus_text(cpus: Iterable[int]) -> str:
    """What ``parse_cpus`` reads as ``cpus``, as short as can be: ``0-3,8``."""
    runs = []
    # Neighbours are as far from their places in the row as one another.
    for _, run in itertools.groupby(enumerate(sorted(set(cpus))), lambda at: at[1] - at[0]):
        numbers = [cpu for _, cpu in run]
        ends = {numbers[0]: None, numbers[-1]: None}
        runs.append("-".join(str(end) for end in ends))
    return ",".join(runs)


def is_choice(text: str) -> bool:
    """Whether ``expert.cpus`` may say so."""
    if text in (AUTO, ANY):
        return True
    try:
        return bool(parse_cpus(text))
    except ValueError:
        return False


def share_of(cpus: Collection[int], index: int, workers: int, threads: int) -> frozenset[int]:
    """The CPUs of the worker of this number among ``workers``, each of ``threads``: contiguous
    shares cover ``cpus``, and differ by one CPU at most. Empty where a worker is better off with
    all of them: alone, one of more than there are CPUs, or with more threads than its share has
    CPUs. A worker of a number beyond ``workers`` shares with one of those.
    """
    if not 1 < workers <= len(cpus):
        return frozenset()
    index %= workers
    first, end = (len(cpus) * at // workers for at in (index, index + 1))
    share = frozenset(sorted(cpus)[first:end])
    return share if len(share) >= threads else frozenset()
