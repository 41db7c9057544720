"""A worker's decode phase: reserve blocks, pull P's rows into them, and join the running batch; or
compute the prompt again.

Knows the engine and a `KVReceiver`; nothing of the prefill phase, of sockets or of routers.
"""
