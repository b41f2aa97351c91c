"""How many tokens went to each expert and rank, as the planner is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mesh.messages import LoadReport

IntTable = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Loads:
    """Sums since start, as they were at one moment."""

    tokens: int
    """Tokens computed."""
    experts: IntTable
    """``[moe layers, experts]`` tokens routed to each."""
    decodes: IntTable
    """Those of them that belong to decode steps."""
    epoch: int
    ranks: tuple[str, ...]
    """Of the placement in use."""
    rank_pairs: dict[str, tuple[int, ...]]
    """Rank -> pairs that it has answered, ``[moe layers]``; of former ranks too."""

    def since(self, before: Loads | None, member: str, incarnation: int) -> LoadReport | None:
        """What came after ``before``, or None if nothing did."""
        experts, decodes = self.experts, self.decodes
        tokens, former = self.tokens, {}
        if before is not None:
            experts, decodes = experts - before.experts, decodes - before.decodes
            tokens, former = tokens - before.tokens, before.rank_pairs
        if not experts.any():
            return None
        none = (0,) * len(experts)
        rank_pairs = np.array(
            [self.rank_pairs.get(rank, none) for rank in self.ranks], dtype=np.int64
        ).reshape(-1, len(experts))
        rank_pairs -= np.array(
            [former.get(rank, none) for rank in self.ranks], dtype=np.int64
        ).reshape(-1, len(experts))
        return LoadReport(
            id=member,
            incarnation=incarnation,
            counts=_rows(experts),
            tokens=tokens,
            decode_counts=_rows(decodes),
            epoch=self.epoch,
            ranks=self.ranks,
            rank_tokens=_rows(rank_pairs.T),
        )


def _rows(table: IntTable) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())
