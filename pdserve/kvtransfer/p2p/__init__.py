"""Hand-off between two engines: P publishes blocks under a lease; D reads them one-sidedly and
verifies generations.

Knows peers, tickets and byte ranges. The bytes move through `kvtransfer.transport`.
"""
