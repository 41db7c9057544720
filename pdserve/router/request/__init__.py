"""One request from its prompt to its last token: tokenising, legs at workers, failover, the record
of its tokens.

Knows the fleet and the chooser; no HTTP.
"""
