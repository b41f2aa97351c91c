"""The planner: membership, load statistics, placement and its roll-out. Never on the token path.

Layers, each importing only those above it; nothing here imports torch:

    policies, balance       pure functions and tallies of numbers
    rollout                 which placement is in force and who must still acknowledge it (pure)
    coordinator             membership + roll-out + loads: (message, now) -> effects (pure)
    store, metrics          the last plan on disk; figures for Prometheus
    service                 sockets, clock, metrics; carries out the effects
"""
