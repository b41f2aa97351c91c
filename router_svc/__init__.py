"""Attention workers: scheduling, KV blocks, attention, gate, dispatch to experts, sampling.

Layers, lowest first (an arrow means "may import")::

    service -> engine -> step -> microbatch, experts -> routing
       |         |        |            |
       |         +--------+--> scheduler -> sequence -> blocks
       |         +--> lanes   +--> profile
       +--> metrics
       +--> group -> group_model -> peers     router.tp > 1: this process leads others
              +--> follower ------> peers     ... each of which runs ``follower``
              +--> device_group               ... both ends where the ranks compute on devices

Pure modules (no asyncio, no clock, no plane): ``blocks``, ``sequence``, ``scheduler``,
``microbatch``, ``routing``. ``engine`` is the compute thread, ``service`` the event loop around it.
"""
