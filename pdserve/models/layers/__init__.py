"""What models are made of: products, norms, attention, gated MLPs, embeddings and heads.

A layer declares its weights when it is made, in this rank's share, and computes on the rows of a
step through Ops. Knows no family and no file: models/*.py put layers together.
"""
