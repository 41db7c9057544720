"""Which workers a request goes to: filter, score, pick, and whether its prompt is split off.

Decides over `fleet.worker_state`, and notes there what was sent; sends nothing itself.
"""
