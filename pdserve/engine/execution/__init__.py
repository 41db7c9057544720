"""Runs the model over a step's messages: packed inputs, CUDA graphs, attention over the paged KV
cache, then the sampler.

Knows messages and the model. Knows nothing of plans, sequences or the owners of blocks.
"""
