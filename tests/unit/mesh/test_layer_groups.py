from __future__ import annotations

import pytest

from mesh.layer_groups import LayerGroups


@pytest.mark.parametrize(("num_layers", "labels"), [
    (1, ("0-0",)),
    (4, ("0-0", "1-1", "2-2", "3-3")),
    (5, ("0-1", "2-3", "4-4")),
    (61, ("0-15", "16-31", "32-47", "48-60")),
])  # fmt: skip
def test_groups_are_at_most_four_runs_that_hold_every_layer(
    num_layers: int, labels: tuple[str, ...]
) -> None:
    groups = LayerGroups(num_layers)
    assert groups.labels == labels
    for layer in range(num_layers):
        first, last = labels[groups.of(layer)].split("-")
        assert int(first) <= layer <= int(last)


def test_a_layer_beyond_the_last_belongs_to_the_last_group() -> None:
    assert LayerGroups(5).of(99) == 2
