"""A receiver's connection to one peer.

One thread connects, tests, reads, verifies, and knows when memory is quiet. Knows tickets,
generations and the staging ring; nothing of requests, letters, or an engine's other ranks.
"""
