"""A worker: one loop that composes an engine, a connector, both phases and the KV pool; and the
process around it.

`loop.py` is the loop, `host.py` its process, `engine_client.py` the replica's end of the wire
between them. `pool_phase.py` asks the KV pool and fills it; the other files keep legs, peers and
what routers are told. Knows the messages of `protocol`; no Ray, no HTTP, and nothing of how routers
choose.
"""
