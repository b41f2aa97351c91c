from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mesh.messages import PinDetail, Placement
from planner_svc.decide import Orders
from planner_svc.store import (
    ORDERS,
    PLAN,
    StoreError,
    keep_orders,
    keep_plan,
    read_orders,
    read_plan,
)

PLACEMENT = Placement(
    epoch=3,
    moe_layers=(1,),
    num_experts=2,
    ranks=("e0", "e1"),
    slots_per_rank=(2, 1),
    physical_to_logical=((0, 1, -1),),
)


def test_what_was_kept_last_is_read_back_from_a_private_directory(tmp_path: Path) -> None:
    state = tmp_path / "state" / "mesh"
    assert read_plan(state, "d") is None
    keep_plan(state, "d", PLACEMENT)
    keep_plan(state, "d", PLACEMENT)
    assert read_plan(state, "d") == PLACEMENT
    assert [path.name for path in state.iterdir()] == [PLAN]
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_a_plan_for_another_model_is_none(tmp_path: Path) -> None:
    keep_plan(tmp_path, "d", PLACEMENT)
    assert read_plan(tmp_path, "other") is None


def test_orders_are_read_back_and_none_tell_a_new_mesh(tmp_path: Path) -> None:
    assert read_orders(tmp_path) is None
    keep_orders(tmp_path, Orders())
    assert read_orders(tmp_path) == Orders()
    orders = Orders(mode="off", pins=(PinDetail(layer=1, expert=0, ranks=("e0",)),))
    keep_orders(tmp_path, orders)
    assert read_orders(tmp_path) == orders


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_digest": "d"}', "\xff"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    for name in (PLAN, ORDERS):
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match=PLAN):
        read_plan(tmp_path, "d")
    with pytest.raises(StoreError, match=ORDERS):
        read_orders(tmp_path)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with pytest.raises(StoreError, match=str(occupied)):
        keep_plan(occupied, "d", PLACEMENT)
    with pytest.raises(StoreError, match=ORDERS):
        keep_orders(tmp_path / "missing", Orders())
    if os.getuid():  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(StoreError, match="state"):
            keep_plan(tmp_path / "state", "d", PLACEMENT)
