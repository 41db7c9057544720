"""Mixtures of experts: which experts a row goes to, which rank has them, and what they compute from
it. The room has the kernels and their twins in plain torch.

It knows rows of activations, stacked matrices and the numbers of ranks. It knows nothing of models,
and nothing of how ranks reach each other.
"""
