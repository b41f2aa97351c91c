"""Data planes and expert kernels; needs torch and numpy only, and ``triton`` Triton.

Layers, each importing only those above it:

    plane         the Protocols of a data plane and what travels on it
    routing       which rank and slot each pair goes to, and the messages; in C
    gating        experts and weights from a gate's logits; in C
    rows          RMS norm; in C
    fp8           e4m3 with scales as DeepSeek-V3 has it, in torch
    weight_memory where packed weights lie: large blocks, in huge pages
    packed        weight matrices packed for the CPU's fastest linear kernel
    grouped_ffn   the SwiGLU experts of one MoE layer on one rank, over ``packed``
    bundle        one expert as bytes, to travel to another process
    shadow        one token that an expert computes before it may serve
    shm           the plane for processes of one host: lanes in shared memory
    ahead         a router's decode step through all layers, over such lanes; in C
    tcp           the plane between hosts: lanes over TCP
    group         the planes over torch.distributed: gloo and NCCL
    ranks         rows to a tensor-parallel group's ranks and sums back, over the same
    triton        the same work on a GPU: kernels with their ahead-of-time compilation
    planes        the plane that a setting names

Importing this package imports nothing; each process imports the modules that it needs.
"""
