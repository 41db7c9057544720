"""Products of few rows with a weight matrix, norms and gates: kernels, and their twins in plain torch.

Knows matrices; nothing of layers, models or the KV cache.
"""
