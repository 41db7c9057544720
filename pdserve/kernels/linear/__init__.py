"""Products of few rows with a weight matrix, also fused with the norm before and the gate after.
The room has the kernels and their twins in plain torch.

It knows matrices; nothing of layers, models or the KV cache.
"""
