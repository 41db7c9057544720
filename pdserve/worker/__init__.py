"""A worker: one loop that composes an engine, a connector, both phases and the KV pool; and the
process around it.

`loop.py` is the loop, `host.py` its process, `engine_client.py` the replica's end of the wire
between them; the other files keep what the loop tells routers. Knows the messages of `protocol`;
no Ray, no HTTP, and nothing of how routers choose.
"""
