"""Answers: parses generated text into reasoning, content and tool calls while it is generated.

Callers use `parser`. `formats` finds the format of a model, `pieces` defines the output, and
`native` has a file for each form of calls. This package knows no HTTP, no requests, no tokenizer
and no torch.
"""
