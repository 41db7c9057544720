"""Rules that change logits before tokens are drawn from them, a file each: biases, masked stop
tokens, penalties.

A rule knows the rows that ask for it and the logits; no other rule, no draws, no scheduling.
`logit_rule.py` says what one is, `registry.py` which there are and in what order they are applied.
"""
