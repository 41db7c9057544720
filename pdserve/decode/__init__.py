"""A worker's decode phase: reserve blocks, pull P's rows into them and join the running batch, or
compute the prompt again.

Knows the engine and a `KVReceiver`; no prefill phase, no sockets and no routers.
"""
