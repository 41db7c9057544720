"""A worker's prefill phase: compute a prompt, publish its blocks, and keep them pinned until D has
them.

Knows the engine and a `KVSender`; no decode phase, no sockets and no routers.
"""
