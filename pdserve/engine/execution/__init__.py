"""Runs the model over a step: packed inputs, CUDA graphs, attention over the paged KV cache.

Knows the plan of a step and the model; nothing of queues, sampling parameters or blocks' owners.
"""
