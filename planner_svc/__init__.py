"""The planner: membership, load statistics, placement and its roll-out. Never on the token path.

Layers, each importing only those above it; nothing here imports torch:

    policies, balance       pure functions and tallies of numbers
    prices, worth           whether a plan is worth its moves (pure)
    waves, sharing          safe steps between layouts; where experts go when no load counts (pure)
    rank_state, holdings    what ranks were told, are promised to hold and are known to hold (pure)
    wave_runner, urgent     one wave to its commit; experts that nobody serves (pure)
    rollout                 the placement in force, and the way to the one that is wanted (pure)
    decide                  when to plan, and what becomes of a plan (pure)
    recordings, admin       what administrators ask and order (pure)
    coordinator             membership + roll-out + loads: (message, now) -> effects (pure)
    formats, initial        placement files of other systems; the one to start from
    store, metrics          the last plan on disk; figures for Prometheus
    service                 sockets, clock, metrics; carries out the effects
"""
