"""Turns logits into tokens without waiting for the device: each row's parameters, the draws, and
the results on their way back.

Knows rows and slots of the batch; nothing of the model or the scheduler. The host half
(row_staging) makes messages, and the device half (sampler) carries them out. A rule of `rules` has
a part in both.
"""
