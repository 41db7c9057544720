"""Sources that narrow the tokens that a row may draw: each clears bits of the row's mask.

Knows one row at a time; no device. Called by the rule `token_mask`.
"""
