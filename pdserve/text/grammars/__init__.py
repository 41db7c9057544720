"""Grammars: the form that an answer must have, from the fields of a request to one llguidance
grammar.

`structured` reads the fields, `grammar_of` makes the grammar, `checker` checks that it can be used,
and `tools` makes the grammar of tool calls. This package needs no torch. It knows no HTTP, no
workers and no tokenizer.
"""
