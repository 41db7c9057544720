"""The way in which Triton kernels are launched, the parts that all of them share, how they are
compiled ahead, how launches are repeated, and the count of kernels that are compiled late.

The room knows no kernel.
"""
