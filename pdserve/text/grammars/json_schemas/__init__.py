"""JSON schemas as llguidance takes them, and what it cannot enforce of them.

The modules know schemas alone: no requests, no grammars of other notations, and no tools.
"""
