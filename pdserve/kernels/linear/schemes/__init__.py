"""Schemes: the ways in which the device holds weight matrices, a file each. `scheme.py` says what
one is. How a checkpoint holds a matrix need not be the same (`models/sources`).

Knows which tensors the device has of a matrix, and which products read them. Knows no model and no
file.
"""
