"""The resources that replicas ask of Ray, and whether the nodes have room for them.

Knows resources and nodes; starts nothing.
"""
