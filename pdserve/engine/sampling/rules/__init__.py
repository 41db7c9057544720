"""Rules that change logits before tokens are drawn, one per file: biases, masked stop tokens,
penalties and others.

A rule knows the rows that ask for it and the logits; no other rule, no draws, no scheduling.
`logit_rule.py` defines a rule; `registry.py` lists all rules in the order of their application.
"""
