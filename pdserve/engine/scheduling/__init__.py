"""Decides what the next step computes: requests and their sequences, the queue, the plan of a step.

Pure CPU work on counts and tokens. Knows blocks only through `engine.memory.block_manager`, and
nothing of devices or models.
"""
