"""Sources: how a matrix is read from a checkpoint of each format, a file each. `source.py` says
what one is; `storage.py` says which one a module has, and with which scheme it is held.

Knows the formats (`models/formats`) and the pieces that schemes take (`kernels/linear/schemes`); no
file, no layer.
"""
