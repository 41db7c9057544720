"""Facts of models that take more than a number: parts of a ModelSpec, and how config.json says
them.

Torch-free. Used by models/config.py and by the rows of models/families.py.
"""
