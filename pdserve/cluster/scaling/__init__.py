"""How many workers run, and somebody always decodes: decided on one router, carried out by Serve's
controller.

`demand.py` is the pure decision; the others watch, ask and set. Knows no requests.
"""
