"""From logits to tokens: kernels for draws, filters, edits, penalties and log-probabilities, and
their twins in torch.

Knows rows of logits and slots of the batch; nothing of requests or of where the logits come from.
"""
