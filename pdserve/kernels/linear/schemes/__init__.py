"""Schemes: the ways in which weight matrices are stored, a file each. `scheme.py` says what one is.

A scheme knows the tensors that a checkpoint holds of a matrix, what of them goes to the device, and
which products read that. Knows no model and no file.
"""
