"""Layers in few groups of neighbours, so that figures per layer stay few series. Pure."""

from __future__ import annotations

_MOST_GROUPS = 4


class LayerGroups:
    """The layers ``0 .. num_layers - 1`` in at most ``most`` runs of equal length, the last of
    which may be shorter. ``labels``: the first and the last layer of each, as in ``7-13``.
    """

    __slots__ = ("_count", "_size", "labels")

    def __init__(self, num_layers: int, most: int = _MOST_GROUPS) -> None:
        assert num_layers >= 1
        self._size = -(-num_layers // most)
        self.labels = tuple(
            f"{first}-{min(first + self._size, num_layers) - 1}"
            for first in range(0, num_layers, self._size)
        )
        self._count = len(self.labels)

    def of(self, layer: int) -> int:
        """The index of a layer's group; what lies beyond the last layer belongs to the last."""
        group = layer // self._size
        return group if group < self._count else self._count - 1
