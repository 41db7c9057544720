"""How one engine's model is spread over ranks.

Today this is `ParallelDims`, the degrees and this rank's place in them. Knows no model, opens no
process group, and asks nobody who it is: it is told.
"""
