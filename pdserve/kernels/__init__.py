"""Kernels: the functions a model computes with, in Triton and in plain torch.

`ops.py` gathers them in groups; the rooms hold a group each: its interface (`ops.py`), the Triton
kernels and what checks and launches them (`triton_ops.py`), and beside them the twins in plain
torch (`reference.py`) that they are compared with. Knows tensors; nothing of models, schedulers or
requests.
"""
