"""The gateway: OpenAI-compatible REST in front of a mesh. Free of torch.

Layers, each importing only what stands below it::

    service, server, access      the process, its HTTP server, keys and certificates
    api/                         HTTP: app, http, guard, completions, chat_completions, admin, run,
                                 engine, requests, sampling, prompts, logprobs, responses,
                                 openapi, schemas
    generation                   one request's sequences
    pool                         links to routers            (the only user of mesh.links)
    sequences, routers, affinity which router has what, whose turn it is (no I/O)
    output, stops                tokens to text              (pure)
    text, chat                   tokenizer, chat template
    admission, fairness          room, and turns             (pure)
    keys, tenants                who shares the gateway      (pure but for reading the key file)
    meters, errors
"""
