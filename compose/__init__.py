"""The ``moemesh`` command: starts a mesh on this host, shows it, stops it.

Layers, lowest first (an arrow means "may import")::

    cli -> app -> commands.* -> launcher -> child, probes, console
    child, probes, console -> processes, restarts, log_file, holder

Pure modules (no asyncio, no processes, no clock): ``processes``, ``restarts``, ``status_view``.
The launcher only composes: every child is exactly what systemd or a container would start,
``python -m gateway|router_svc|expert_svc|planner_svc``, and nothing here touches a token.
"""
