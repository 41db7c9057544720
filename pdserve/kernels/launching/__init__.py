"""The way in which Triton kernels are launched, the parts that all of them share, and the count of
kernels that are compiled late.

The room knows no kernel.
"""
