"""Operations that the ranks of one engine compute together. They sum partial products, gather
logits from slices of the vocabulary, and send the drawn tokens to all.

The room knows ranks and how they reach each other; nothing of layers or steps.
"""
