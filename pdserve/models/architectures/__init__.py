"""The classes that compute models, a file for each kind: layers put together. models/families.py
says which family is computed by which.

Knows layers; no file, no step.
"""
