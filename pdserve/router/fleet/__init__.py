"""The workers as this router sees them: one event stream each, their state, commands to them.

Knows no requests beyond their legs and does not choose.
"""
