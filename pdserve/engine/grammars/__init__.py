"""Grammars that tell which token may come next, and their making: beside the engine, in threads,
under a deadline.

Knows tokens alone; no requests, no batches and no device. A `GrammarEngine` (llguidance) stands
behind the protocols of `grammar`.
"""
