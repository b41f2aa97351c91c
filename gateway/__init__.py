"""The gateway: OpenAI-compatible REST in front of a mesh. Free of torch.

Layers, each importing only what stands below it::

    service, server              the process, its HTTP server
    api/                         HTTP: app, http, completions, chat_completions, run, engine,
                                 requests, sampling, prompts, logprobs, responses
    generation                   one request's sequences
    pool                         links to routers            (the only user of mesh.links)
    sequences, routers, affinity which router has what       (no I/O)
    output, stops                tokens to text              (pure)
    text, chat                   tokenizer, chat template
    admission, meters, errors
"""
