"""The KV cache's memory and the batch's state on the device: kernels that write, copy, gather and repack rows.

Knows blocks, rows and slots; nothing of who owns a block (`engine.memory.block_manager`) or of attention.
"""
