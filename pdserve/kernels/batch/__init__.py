"""The batch's state on the device, block tables and newest tokens by slot: kernels, and their twins
in plain torch.

Knows slots; nothing of sequences.
"""
