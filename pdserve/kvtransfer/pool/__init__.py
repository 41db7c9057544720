"""The KV pool: rows that are kept outside the engines and found again by their tokens, on LMCache's
server or in this process.

Knows chunks of whole blocks, their names and seals; nothing of peers or hand-offs.
"""
