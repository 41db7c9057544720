"""Chooses the workers of a request: filter, score, pick, and whether to split the prompt off.

It decides over `fleet.worker_state` and notes there what was sent. It sends nothing itself.
"""
