"""KV blocks under any order of sharing, writing, publishing and releasing."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router_svc.blocks import BlockManager, chain_key

SIZE = 4
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


def keys_of(tokens: tuple[int, ...]) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        keys.append(chain_key(keys[-1] if keys else b"", tokens[start : start + SIZE]))
    return keys


class Blocks(RuleBasedStateMachine):
    """Every owner writes its tokens into its blocks; ``memory`` is what the cache then holds."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(12, SIZE)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.tables: dict[int, tuple[tuple[int, ...], list[int]]] = {}
        self.next_owner = 0

    @rule(target=owners, prompt=PROMPTS)
    def start(self, prompt: list[int]) -> int:
        tokens = tuple(prompt)
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        keys = keys_of(tokens)
        matched = self.manager.match(keys)
        for index, block in enumerate(matched):
            assert self.memory[block] == tokens[: (index + 1) * SIZE], "shared a wrong prefix"
        missing = self.manager.blocks_for(len(tokens)) - len(matched)
        fits = missing <= self.manager.num_free_besides(matched)
        self.manager.share(matched)
        fresh = self.manager.allocate(missing)
        assert (fresh is not None) == fits
        if fresh is None:
            self.manager.release(matched)
            self.tables[owner] = ((), [])
            return owner
        held = {b for _tokens, table in self.tables.values() for b in table}
        assert not held & set(fresh), "handed out a block that somebody holds"
        table = matched + fresh
        for index in range(len(matched), len(table)):
            self.memory[table[index]] = tokens[: (index + 1) * SIZE]
            if index < len(keys):
                self.manager.publish(table[index], keys[index])
        self.tables[owner] = (tokens, table)
        return owner

    @rule(owner=consumes(owners))
    def stop(self, owner: int) -> None:
        _tokens, table = self.tables.pop(owner)
        self.manager.release(table)

    @rule(owner=owners)
    def distrust(self, owner: int) -> None:
        tokens, table = self.tables[owner]
        self.manager.forget(table)
        # Another owner may have written and published the same tokens since.
        assert not set(self.manager.match(keys_of(tokens))) & set(table)

    @rule(owner=owners)
    def holders_keep_their_content(self, owner: int) -> None:
        tokens, table = self.tables[owner]
        for index, block in enumerate(table):
            assert self.memory[block] == tokens[: (index + 1) * SIZE], "a held block was reused"

    @invariant()
    def consistent(self) -> None:
        self.manager.check([table for _tokens, table in self.tables.values()])

    def teardown(self) -> None:
        for _tokens, table in self.tables.values():
            self.manager.release(table)
        self.manager.check([])
        assert self.manager.num_free == self.manager.num_blocks, "blocks leaked"


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
