"""From logits to tokens, without waiting for the device: each row's parameters, the draws, the
results on their way.

Knows rows and slots of the batch; nothing of the model or the scheduler.
"""
