"""The engine's memory: which KV block belongs to whom, and the bytes of the blocks.

`block_manager.py` and `blank_blocks.py` are bookkeeping without tensors. `kv_cache.py` is the
memory with its layout; `kv_cache_size.py` and `device_memory.py` allocate it. `cpu_memory.py` keeps
memory that torch frees. This room knows that steps are in flight, not what they compute. It knows
nothing of requests.
"""
