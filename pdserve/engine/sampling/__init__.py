"""From logits to tokens, without waiting for the device: each row's parameters, the draws, the
results on their way.

Knows rows and slots of the batch; nothing of the model or the scheduler. The host half
(row_staging) makes messages, the device half (sampler) carries them out; a rule of `rules` has a
part in both.
"""
