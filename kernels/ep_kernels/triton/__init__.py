"""Triton kernels for what the CPU path does in C and torch, each with a plain-torch reference.

    tuning        tile shapes of every kernel on every architecture: one table
    arguments     what launchers check before a kernel runs, and the error they raise
    registry      what each kernel module gives to be compiled ahead of time
    parts         functions that kernels are made of
    gate          logits to experts and weights, one row a program
    counting      where each pair stands among the pairs of its expert or slot
    replicas      logical experts to physical slots, split evenly over an expert's places
    permute       tokens into the order of their slots, padded to a tile, and back with weights
    quantise      bf16 rows to FP8 (e4m3) with one scale for 128 values; its reference is in
                  ``ep_kernels.fp8``
    grouped_gemm  the SwiGLU experts of one MoE layer on one rank, bf16 or FP8
    all_to_all    dispatch and combine between processes, one-sided
    attention     softmax over the paged cache, latent or grouped-query
    rows          RMS norm, rotary embedding, the new cache rows
    sampling      a token from logits, without a sort
    foreign       memory that torch did not allocate, as a tensor
    cuda_shared   memory of a GPU that processes share
    host_words    words in host memory that a kernel and another process's CPU tell each other by
    lane_messages messages over lanes, and waiting for their answers, by kernels
    symm          the data plane whose rows they write into such memory
    ahead         a decode step's way to the experts and back, of these kernels
    aot           compiles all of it without a GPU and writes what the compiler says into the docs

Only this package imports triton, and importing this package imports nothing. A module whose name is
a kernel's holds the kernel, its launcher, its reference and ``variants``. Launchers check their
arguments, allocate the result, and neither wait for the device nor read anything back from it.
Tensors on the CPU run in Triton's interpreter, which must have been chosen (``TRITON_INTERPRET=1``)
before triton was imported.

Numbers that vary from launch to launch are not specialized on (``do_not_specialize``): each value's
kind would be compiled anew, for seconds, while others wait.

In a kernel bf16 and FP8 values are widened to fp32 as soon as they are loaded, or given to a matrix
product as they are: Triton's interpreter keeps them as raw bits and would compute with those.
"""
