"""The possible layouts of a number of GPUs, a bound for each of them, and its cluster.yaml.

This package knows profiles and loads. It simulates nothing.
"""
