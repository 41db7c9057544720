"""The parts of models: products, norms, attention, gated MLPs, embeddings and heads.

A layer declares its weights when it is made, in this rank's share, and computes on the rows of a
step through Ops. Layers know no family and no file: models/*.py put layers together.
"""
