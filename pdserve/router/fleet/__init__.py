"""The workers as this router sees them: one event stream each, their state, and commands to them.

Knows requests only by their legs, and does not choose workers.
"""
