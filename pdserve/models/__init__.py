"""Models: what a checkpoint says, its weights, and the arithmetic of each family.

`config.py` reads `config.json` into a `ModelSpec`, `families.py` has a row for each architecture,
`layers` has the parts of models, and `loader.py` fills their weights. A model computes with
`kernels.ops` and the schemes of its weights, over one flat axis of tokens. The room knows no
sequences, KV blocks or requests (docs/design/models.md).
"""
