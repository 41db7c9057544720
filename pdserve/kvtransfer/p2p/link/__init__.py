"""A receiver's connection to one peer.

One thread connects, tests, reads, verifies, and knows when memory is quiet. This room knows
tickets, generations and the staging ring. It knows nothing of requests, letters, or an engine's
other ranks.
"""
