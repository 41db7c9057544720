"""Hand-off between two engines: P publishes blocks under a lease, D reads them one-sidedly and
verifies generations.

Knows peers, tickets and byte ranges; the bytes move by `kvtransfer.transport`.
"""
