"""Text and tokens: tokenizer, chat template, detokenising token by token, stop strings.

A router and the offline `LLM` use the same files, so both show the same text. Torch-free, and
imports no other room. Knows no requests, no workers and no engine.
"""
