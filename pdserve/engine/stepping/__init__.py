"""A step as data: what the planner makes of a plan, what an executor does with it, and what the
collector makes of its results.

Knows sequences and blocks on one side, messages on the other; no model and no device.
"""
