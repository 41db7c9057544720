"""The classes that compute models, one file for each kind. They put layers together.
models/families.py says which class computes which family.

They know layers; no file, no step.
"""
