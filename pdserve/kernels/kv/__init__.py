"""Rows and blocks of the KV cache: kernels that write, copy, gather and repack them, and their
twins in plain torch.

Knows blocks and slots; nothing of who owns a block (`engine.memory.block_manager`) or of attention.
"""
