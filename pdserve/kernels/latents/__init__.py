"""Attention over latents: what a layer writes of a token, and how its heads attend to that.
Kernels, and their twins in plain torch.

Knows sequences and blocks, as attention does; nothing of layers, models or ranks.
"""
