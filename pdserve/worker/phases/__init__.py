"""The phases that a worker's requests go through beside its engine: which there are, and those that
wait for a grammar.

Knows Submits, the engine and the connector; no routers and no wire. Driven by worker.loop.
"""
