"""Products with weights in e4m3 on a GPU.

Knows matrices; nothing of layers, models or the KV cache.
"""
