from __future__ import annotations

from pathlib import Path

import compose
from compose.docs import configuration
from mesh.config import knobs

DOCS = Path(compose.__file__).parents[1] / "docs"


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    # Made by: make docs
    assert (DOCS / "configuration.md").read_text() == configuration()


def test_every_setting_has_a_row_and_words() -> None:
    rows = dict(
        line[3:].split("` | ", 1) for line in configuration().splitlines() if line.startswith("| `")
    )
    assert rows.keys() == {knob.key for knob in knobs()}
    assert all(len(row.split(" | ", 1)[1]) > 8 for row in rows.values())
