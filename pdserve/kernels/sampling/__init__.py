"""From logits to tokens: kernels for draws, filters, edits, penalties and log-probabilities, and
their twins in torch.

They know rows of logits and slots of the batch; nothing of requests or of where logits come from.
"""
