"""Models: checkpoint formats, families, the router's share, experts, the one-process reference.

Import layers, each over those below it::

    reference        device (a router's model on a GPU; the only one that needs Triton)
    forward          model  shard_model  sampler
    experts          attention  gate  layers  plan  kv_cache  rope
    checkpoint       (needs torch from here up)
    inventory  text_files
    spec  tensors  fp8  kv_size  shard  families
    safetensors_header  config_json  architecture  errors

Gateways and planners import only ``spec``, ``errors``, ``shipped`` and ``text_files``, none of
which needs torch; nor do ``shard`` and ``kv_size``,
by which the launcher refuses what cannot be divided and caches that are too small.
"""
