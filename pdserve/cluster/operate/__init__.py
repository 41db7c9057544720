"""The commands of an operator: `pdserve up`, `doctor`, `workers`, `role`, `scale`, `dashboard`.

They read the cluster's file, check it against the nodes, wait and report. A running cluster decides
nothing here.
"""
