"""Grammars decide which token may come next. They are built outside the engine, in threads, with a
deadline.

Knows tokens only: no requests, no batches and no device. A `GrammarEngine` (llguidance) implements
the protocols of `grammar`.
"""
