"""Models: what a checkpoint says, its weights, and the arithmetic of each family.

`config.py` reads `config.json` into a `ModelSpec`, `registry.py` names the families, `loader.py`
fills their weights. A model computes with `kernels.ops` over one flat axis of tokens. Knows no
sequences, positions, KV blocks or requests.
"""
