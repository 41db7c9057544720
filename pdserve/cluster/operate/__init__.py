"""What an operator calls: `pdserve up`, `doctor`, `workers`, `role`, `scale`, `dashboard`.

Reads the cluster's file, checks it against the nodes, waits and reports. Decides nothing that a
running cluster does.
"""
