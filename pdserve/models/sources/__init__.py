"""Sources: how a matrix is read from a checkpoint of each format, one file each. `source.py` says
what a source is. `storage.py` says which source a module has, and by which scheme it is held.

Sources know the formats (`models/formats`) and the pieces that schemes take
(`kernels/linear/schemes`); no file, no layer.
"""
