"""The engine's memory: which KV block belongs to whom, and the bytes behind the blocks.

The block manager is bookkeeping without tensors; the other files allocate. Knows nothing of
requests or steps.
"""
