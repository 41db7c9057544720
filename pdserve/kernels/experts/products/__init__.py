"""Triton products of rows with the experts that they go to: for few rows, for many rows, and for
experts in e4m3 or int4. `kernels.experts.triton_ops` calls them.
"""
