"""Products with weights in int4 on a GPU.

They know matrices; nothing of layers, models or the KV cache.
"""
