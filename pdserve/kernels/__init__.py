"""Kernels: the functions a model computes with, in Triton and in plain torch.

`ops.py` gathers them in groups. Each group is a room with three files: its interface (`ops.py`),
the Triton kernels with their checks and launches (`triton_ops.py`), and their twins in plain torch
(`reference.py`), which tests compare them with. Kernels know tensors; they know nothing of models,
schedulers or requests.
"""
