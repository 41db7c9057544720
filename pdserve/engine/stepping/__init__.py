"""Steps as data: the planner makes messages of a plan, an executor carries them out, and the
collector makes events of the results.

Knows sequences and blocks on one side, messages on the other; no model and no device.
"""
