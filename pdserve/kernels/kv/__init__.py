"""Rows and blocks of the KV cache: kernels that write, copy, gather and repack them, and their
twins in plain torch.

They know blocks and slots; nothing of who owns a block (`engine.memory.block_manager` does), and
nothing of attention.
"""
