"""Attention kinds. ``core`` reads the paged cache; ``mla`` and ``gqa`` project around it."""
