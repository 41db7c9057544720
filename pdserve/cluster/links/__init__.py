"""How processes of a cluster reach each other through Serve: addressed calls, batches of messages,
who is there.

Knows what the Python handle and a router say to each other (`handle_api`); of all other messages
only their bytes.
"""
