"""The way in which Triton kernels are launched, the parts that all of them share, how they are
compiled ahead, and the count of kernels that are compiled late.

The room knows no kernel.
"""
