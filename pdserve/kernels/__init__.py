"""Kernels: the functions a model computes with, in Triton and in plain torch.

`ops.py` names them all, `triton_ops.py` and `reference.py` implement them, the rooms hold one subject each. Knows
tensors; nothing of models, schedulers or requests.
"""
