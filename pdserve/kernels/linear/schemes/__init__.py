"""Schemes: the ways in which the device holds weight matrices, a file each. `scheme.py` says what
one is; `source.py` says how a checkpoint holds one, which need not be the same.

Knows which tensors a checkpoint has of a matrix, what of them goes to the device, and which
products read that. Knows no model and no file.
"""
