"""How Triton kernels are launched, what all of them share, and the count of those that are compiled
late.

Knows no kernel.
"""
