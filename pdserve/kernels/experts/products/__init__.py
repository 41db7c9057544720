"""Triton products of rows with the experts that they go to: of few rows, of many, and of experts
held in e4m3 or int4. Called through `kernels.experts.triton_ops`.
"""
