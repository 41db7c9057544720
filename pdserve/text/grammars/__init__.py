"""Grammars: what an answer must look like, from the fields of a request to one llguidance grammar.

`structured` reads the fields, `grammar_of` makes the grammar, `checker` says whether it can be
used, `tools` makes the grammar of tool calls. Torch-free. Knows no HTTP, no workers and no
tokenizer.
"""
