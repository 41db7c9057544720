"""Attention over latents: what a layer writes for a token, and how its heads attend to that. The
room has the kernels and their twins in plain torch.

It knows sequences and blocks, as attention does; nothing of layers, models or ranks.
"""
