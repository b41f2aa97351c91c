"""The mesh itself, free of torch: messages, links, membership, configuration, logs, metrics.

Layers, lowest first (an arrow means "may import")::

    service -> member -> links -> authority -> curve -> inbox, messages
       |          |        |
       +----------+--------+--> config, logs, metrics, rundir, supervise -> addresses

    membership, placement -> messages, settings

Pure modules (no asyncio, no zmq, no clock): ``messages``, ``settings``, ``config`` (which reads
one file), ``addresses``, ``authority``, ``membership``, ``placement``. Only ``links`` imports zmq.
"""
