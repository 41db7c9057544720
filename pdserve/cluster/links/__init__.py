"""How processes of a cluster reach each other through Serve: addressed calls, batches of messages,
who is there.

Carries bytes; knows messages only by their frames.
"""
