"""The configuration of a cluster: one YAML in, one frozen tree out; and clusters that are ready to
run.

`schema.py` is the whole tree, the other files its subjects. `kv_layout.py` derives every size and
offset of a KV cache. Every other room may import this one. Torch-free. Knows no Ray, no model's
weights, and nothing of how its values are used.
"""
