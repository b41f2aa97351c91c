"""A router's share of a model on a device, by the Triton kernels.

    model        weights, cache and the layer's steps: what ``moe_model.model`` is on a CPU
    attention    both kinds, projections by torch and the rest by kernels
    plan         a step's index tensors, uploaded once
    decode       fixed tensors for decode steps, whose work is captured in CUDA graphs
    shard        one rank's part of it, of a router of several GPUs
    experts      rows down to the expert client, and its sums up again

Weights and cache are bf16, or fp32 with ``weights = "fp32"``; the residual stream, norms and gate
are fp32. All calls are made on the thread that loaded the model.
"""
