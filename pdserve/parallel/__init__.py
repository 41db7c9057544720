"""Spreads one engine's model over ranks.

`ParallelDims` has the degrees and this rank's place in them. `bring_up` starts the ranks together;
the other modules connect them. Knows no model. A process does not ask who it is: it is told.
"""
