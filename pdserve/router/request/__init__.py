"""Takes one request from its prompt to its last token: tokenising, legs at workers, failover, and
the record of its tokens.

Knows the fleet and the chooser, and no HTTP.
"""
