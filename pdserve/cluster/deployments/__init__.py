"""The processes of a running cluster: router replicas, worker replicas and the actors of their
engines.

Each is a thin shell around a room that knows no Ray (`router`, `worker`). This room knows no
command line.
"""
