"""The batch's state on the device: block tables and the newest tokens, by slot. The room has the
kernels and their twins in plain torch.

It knows slots; nothing of sequences.
"""
