"""The expert worker: slots of expert weights and one grouped FFN over all that has arrived.

Layers, each importing only those above it:

    heap        memory at its limits
    pace        how fast experts are loaded
    loading     one expert, from a peer or the checkpoint, proven before it may serve
    slots       which logical expert each slot holds; loads and frees without stopping compute
    worker      the compute thread: arrivals -> grouped FFN -> answers
    bundles     experts from memory to memory, between workers
    metrics     figures for Prometheus
    service     lanes, membership, assignments; what runs on which thread

An expert worker keeps no request state: whatever it knows can be loaded again.
"""
