"""Mixtures of experts: which experts a row goes to, and what they make of it. Kernels, and their
twins in plain torch.

Knows rows of activations and stacked matrices; nothing of layers, models or ranks.
"""
