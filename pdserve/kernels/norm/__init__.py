"""Norms and gates over activations: kernels, and their twins in plain torch.

They know rows of activations; nothing of layers or models.
"""
