"""Fetches prefixes that other workers have cached: asks for them, pulls and counts them.

Knows the engine, a KVReceiver, and what peers report of their links; no sockets and no routers.
"""
