"""Which workers a request goes to: filter, score, pick, and whether its prompt is split off.

Pure decisions over `fleet.worker_state`; sends nothing.
"""
