"""What the next step computes: requests and their sequences, the queue, the plan of a step.

Pure CPU work on counts and tokens. Knows blocks only by `engine.memory.block_manager`; nothing of
devices or models.
"""
