"""Schemes: the ways in which the device holds weight matrices, one file each. `scheme.py` says what
a scheme is. A checkpoint may hold a matrix in another way (`models/sources`).

A scheme knows which tensors the device has for a matrix, and which products read them. It knows no
model and no file.
"""
