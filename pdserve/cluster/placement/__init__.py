"""What replicas ask of Ray, and whether the nodes have room for it.

Knows resources and nodes; starts nothing.
"""
