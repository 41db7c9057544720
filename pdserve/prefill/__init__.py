"""A worker's prefill phase: compute a prompt, publish its blocks, and keep them pinned until D has
them.

Knows the engine and a `KVSender`; nothing of the decode phase, of sockets or of routers.
"""
