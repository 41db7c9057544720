"""Text and tokens: tokenizer, chat template, detokenising token by token, stop strings.

A router and the offline `LLM` use the same files, so both show the same text. This room needs no
torch and imports no other room. It knows no requests, no workers and no engine.
"""
