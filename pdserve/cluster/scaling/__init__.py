"""Decides how many workers run and what role each has, and makes sure that somebody always decodes.

One router decides; Serve's controller and the workers carry it out. `demand.py` and `balance.py`
are the pure decisions; the other files watch, ask and set. Knows no requests.
"""
