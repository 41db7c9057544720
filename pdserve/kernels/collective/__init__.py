"""What the ranks of one engine compute together: sums of partial products, logits from slices of
the vocabulary, the tokens that one of them drew.

Knows ranks and how they reach each other; nothing of layers or steps.
"""
