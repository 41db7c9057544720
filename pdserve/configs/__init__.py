"""The configuration of a cluster, and example clusters that are ready to run.

`schema.py` holds the whole tree, and the other files hold its parts. `kv_layout.py` derives every
size and offset of a KV cache. Every other room may import this one. It imports no torch and no Ray,
reads no weights, and does not know how its values are used.
"""
