"""Which routers have lately seen a prompt's first tokens, so that its KV blocks may be there.

Pure. A hint only: a wrong answer costs a prefix-cache hit, never a wrong token, so Python's
own tuple hash is enough.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MAX_BLOCKS = 64


class PrefixTable:
    """Remembers for each of the last ``capacity`` prompt prefixes the router that ran it.

    A prefix is the first 1, 2, 3 ... blocks of ``block_tokens`` tokens, at most 64 of them.
    """

    def __init__(self, capacity: int = 8192, block_tokens: int = 16) -> None:
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._router_of: OrderedDict[int, str] = OrderedDict()

    def _prefixes(self, prompt: Sequence[int]) -> list[int]:
        size = self._block_tokens
        chain = 0
        prefixes = []
        for end in range(size, min(len(prompt), size * _MAX_BLOCKS) + 1, size):
            chain = hash((chain, tuple(prompt[end - size : end])))
            prefixes.append(chain)
        return prefixes

    def record(self, prompt: Sequence[int], router: str) -> None:
        """``prompt`` went to ``router``: its blocks will be cached there."""
        table = self._router_of
        for prefix in self._prefixes(prompt):
            table[prefix] = router
            table.move_to_end(prefix)
        while len(table) > self._capacity:
            table.popitem(last=False)

    def match(self, prompt: Sequence[int]) -> str:
        """The router of the longest remembered prefix of ``prompt``, or "" if none is."""
        for prefix in reversed(self._prefixes(prompt)):
            router = self._router_of.get(prefix)
            if router is not None:
                return router
        return ""

    def forget(self, router: str) -> None:
        """``router`` is gone, and its KV cache with it."""
        for prefix in [p for p, r in self._router_of.items() if r == router]:
            del self._router_of[prefix]
