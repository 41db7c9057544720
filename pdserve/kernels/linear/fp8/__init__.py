"""Products with weights in e4m3 on a GPU.

They know matrices; nothing of layers, models or the KV cache.
"""
