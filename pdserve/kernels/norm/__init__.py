"""Norms and gates over activations: kernels, and their twins in plain torch.

Knows rows of activations; nothing of layers or models.
"""
