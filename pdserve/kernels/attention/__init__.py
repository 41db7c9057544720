"""Attention over a paged KV cache: kernels for decoding and prompts, and their twins in plain
torch.

They know the layout of one layer's KV cache and block tables; nothing of models, sequences or
sampling.
"""
