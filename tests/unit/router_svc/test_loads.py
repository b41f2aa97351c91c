from __future__ import annotations

import numpy as np

from mesh.messages import LoadReport
from router_svc.loads import Loads


def loads(tokens: int, experts, decodes, pairs: dict[str, tuple[int, ...]], **kw) -> Loads:
    return Loads(
        tokens=tokens,
        experts=np.array(experts),
        decodes=np.array(decodes),
        rank_pairs=pairs,
        **{"epoch": 1, "ranks": tuple(pairs)} | kw,
    )


def test_the_first_report_has_everything() -> None:
    now = loads(7, [[1, 2], [3, 0]], [[0, 1], [1, 0]], {"a": (1, 2), "b": (2, 1)})
    assert now.since(None, "r", 5) == LoadReport(
        id="r",
        incarnation=5,
        counts=((1, 2), (3, 0)),
        tokens=7,
        decode_counts=((0, 1), (1, 0)),
        epoch=1,
        ranks=("a", "b"),
        rank_tokens=((1, 2), (2, 1)),
    )


def test_a_later_report_has_what_came_since_whatever_became_of_the_ranks() -> None:
    before = loads(7, [[1, 2]], [[0, 1]], {"a": (1,), "b": (2,)})
    after = loads(
        9,
        [[4, 2]],
        [[0, 1]],
        {"a": (1,), "b": (4,), "c": (1,)},
        epoch=2,
        ranks=("c", "b", "d"),
    )
    report = after.since(before, "r", 5)
    assert report is not None
    assert (report.counts, report.decode_counts, report.tokens) == (((3, 0),), ((0, 0),), 2)
    assert (report.epoch, report.ranks, report.rank_tokens) == (2, ("c", "b", "d"), ((1, 2, 0),))


def test_nothing_is_reported_when_nothing_came() -> None:
    now = loads(7, [[1, 2]], [[0, 1]], {"a": (3,)})
    assert now.since(now, "r", 5) is None


def test_without_a_placement_there_are_no_ranks_to_report() -> None:
    report = loads(1, [[1], [1]], [[0], [0]], {}).since(None, "r", 5)
    assert report is not None
    assert report.rank_tokens == ((), ())
