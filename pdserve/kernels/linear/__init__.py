"""Products of few rows with a weight matrix, also fused with the norm before and the gate after:
kernels, and their twins in plain torch.

Knows matrices; nothing of layers, models or the KV cache.
"""
