"""The expert worker: slots of expert weights and one grouped FFN over all that has arrived.

Layers, each importing only those above it:

    slots       which logical expert each slot holds; loads and frees without stopping compute
    worker      the compute thread: arrivals -> grouped FFN -> answers
    metrics     figures for Prometheus
    heap        gives memory back after loading
    service     lanes, membership, loading; three threads: event loop, compute, loader

An expert worker keeps no request state: whatever it knows can be loaded again.
"""
