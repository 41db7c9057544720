"""Grammars of arguments that are written one by one between tags, as by Qwen3-Coder.

`rules` writes the Lark, and `plain_text` says which texts the parser reads as a value that fits.
"""
