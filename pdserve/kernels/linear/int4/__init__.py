"""Products with weights in int4 on a GPU.

Knows matrices; nothing of layers, models or the KV cache.
"""
