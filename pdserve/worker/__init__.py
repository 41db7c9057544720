"""A worker: one loop that combines an engine, a connector, both phases and the KV pool, and the
process around it.

`loop.py` is the loop, `hosts` its processes, and `engine_client.py` the replica's end of the wire
between them. `pool_phase.py` asks the KV pool and fills it. The other files keep legs, peers and
the reports to routers. Knows the messages of `protocol`; no Ray, no HTTP, and not how routers
choose.
"""
