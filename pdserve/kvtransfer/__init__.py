"""Moves rows of KV caches between engines, and to and from the KV pool.

`connector.py` is the interface that workers use; `build.py` makes what the configuration names.
`p2p` reads from a peer's memory over a `transport`; `pool` talks to a server that keeps rows. Knows
blocks, generations and tickets. Knows nothing of tokens' meaning, the prefix cache or the
scheduler.
"""
