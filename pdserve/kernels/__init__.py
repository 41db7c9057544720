"""Kernels: the functions a model computes with, in Triton and in plain torch.

`ops.py` names them all; `triton_ops.py` and `torch_ops.py` implement them; the rooms hold one
subject each, the Triton kernels beside the twins (`reference.py`) that they are compared with.
Knows tensors; nothing of models, schedulers or requests.
"""
