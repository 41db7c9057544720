"""Facts of models that take more than a number: parts of a ModelSpec, and how config.json says
them.

This room needs no torch. models/config.py and the rows of models/families.py use it.
"""
