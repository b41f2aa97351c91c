"""KV blocks: who holds which, and which full blocks can be shared by prefix.

Pure bookkeeping over block ids; the cache's memory itself belongs to the model. A block is

* *held*: one or more sequences list it in their block table (``refs > 0``);
* *cached*: nobody holds it, its content is still known by its key, and it can be revived;
* *blank*: nobody holds it and its content is worthless.

Only full blocks have keys, and a full block is never written again, so sharing needs no copy.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

BlockKey = bytes
"""Digest of a block's tokens and of everything before them."""

_KEY_BYTES = 16


def chain_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Key of a full block whose predecessor has key ``parent`` (empty for the first).

    A cryptographic digest, because a collision would serve one prompt's cache to another.
    """
    return hashlib.blake2b(
        array("q", tokens).tobytes(), digest_size=_KEY_BYTES, key=parent
    ).digest()


class BlockManager:
    """Reference-counted blocks with prefix reuse and least-recently-used eviction."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a KV cache needs a block of one token or more, not {num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks))  # a heap: low ids first keep the touched memory small
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._key_of: dict[int, BlockKey] = {}
        self._by_key: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Longest run of known blocks for a prompt's leading keys. Takes no reference."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_besides(self, matched: Iterable[int]) -> int:
        """Free blocks left once ``matched`` ones have been revived by ``share``."""
        return self.num_free - sum(1 for block in matched if self._refs[block] == 0)

    def share(self, blocks: Iterable[int]) -> None:
        """Take a reference on blocks that ``match`` returned."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None (and no change) if there are fewer.

        Blank blocks go first, lowest id first; then the least recently freed cached ones, whose
        keys are forgotten.
        """
        if count > self.num_free:
            return None
        taken = []
        for _ in range(count):
            if self._blank:
                block = heapq.heappop(self._blank)
            else:
                block, _none = self._cached.popitem(last=False)
                del self._by_key[self._key_of.pop(block)]
            self._refs[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, key: BlockKey) -> None:
        """Make a held block whose last token has been written findable by its key.

        When another block already has the key, this one stays private.
        """
        if not self.prefix_cache or key in self._by_key or block in self._key_of:
            return
        assert self._refs[block] > 0, "only a held block has content to publish"
        self._key_of[block] = key
        self._by_key[key] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Let nobody find these held blocks by their keys any more: their content is bad."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._by_key[key]

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each. The tail of a sequence is evicted before its head, since a
        tail is useless without the head.
        """
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} is released more often than held"
            self._refs[block] = refs
            if refs == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    heapq.heappush(self._blank, block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, given the block table of every live sequence."""
        held = Counter(block for table in tables for block in table)
        assert all(self._refs[b] == held.get(b, 0) for b in range(self.num_blocks)), (
            "reference counts differ from the block tables"
        )
        blank, cached = set(self._blank), set(self._cached)
        assert len(blank) == len(self._blank), "a blank block is listed twice"
        assert not blank & cached, "a block is blank and cached"
        assert blank | cached == {b for b in range(self.num_blocks) if not self._refs[b]}, (
            "a block is neither held nor free"
        )
        assert not blank & self._key_of.keys(), "a blank block has a key"
        assert cached <= self._key_of.keys(), "a cached block has no key"
        assert {k: b for b, k in self._key_of.items()} == self._by_key, "key tables disagree"
