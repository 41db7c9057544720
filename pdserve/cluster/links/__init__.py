"""Connects the processes of a cluster through Serve: addressed calls, batches of messages, and the
list of running workers.

This room knows what the Python client and a router say to each other (`handle_api`). Of all other
messages it knows only their bytes.
"""
