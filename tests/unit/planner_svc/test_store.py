from __future__ import annotations

from pathlib import Path

import pytest

from mesh.messages import Placement
from planner_svc.store import FILE_NAME, StoreError, keep_plan, read_plan

PLACEMENT = Placement(
    epoch=3,
    moe_layers=(1,),
    num_experts=2,
    ranks=("e0", "e1"),
    slots_per_rank=(2, 1),
    physical_to_logical=((0, 1, -1),),
)


def test_what_was_kept_last_is_read_back(tmp_path: Path) -> None:
    assert read_plan(tmp_path, "d") is None
    keep_plan(tmp_path, "d", PLACEMENT)
    keep_plan(tmp_path, "d", PLACEMENT)
    assert read_plan(tmp_path, "d") == PLACEMENT
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_plan_for_another_model_is_none(tmp_path: Path) -> None:
    keep_plan(tmp_path, "d", PLACEMENT)
    assert read_plan(tmp_path, "other") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_digest": "d"}', "\xff"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match=FILE_NAME):
        read_plan(tmp_path, "d")


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=FILE_NAME):
        keep_plan(tmp_path / "missing", "d", PLACEMENT)
