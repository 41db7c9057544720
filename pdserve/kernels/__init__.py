"""Kernels: the functions a model computes with, in Triton and in plain torch.

`ops.py` gathers them in groups, and each group is a room. A room has its interface (`ops.py`), the
checks and launches of its Triton kernels (`triton_ops.py`), and their twins in plain torch
(`reference.py`), which tests compare them with. Kernels know tensors; they know nothing of models,
schedulers or requests.
"""
