"""Data planes and expert kernels; needs torch and numpy only.

Layers, each importing only those above it:

    plane         the Protocols of a data plane and what travels on it
    packed        weight matrices packed for the CPU's fastest linear kernel
    grouped_ffn   the SwiGLU experts of one MoE layer on one rank, over ``packed``
    shm           the plane for processes of one host: lanes in shared memory

Importing this package imports nothing; each process imports the modules that it needs.
"""
