"""The KV pool: rows kept outside the engines, found again by their tokens, on LMCache's server or
in this process.

Knows chunks of whole blocks, their names and seals; nothing of peers or hand-offs.
"""
