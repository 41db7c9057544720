"""The phases that a worker's requests go through besides its engine: one class for all of them, and
the phase that waits for a grammar.

Knows Submits, the engine and the connector; no routers and no wire. Driven by worker.loop.
"""
