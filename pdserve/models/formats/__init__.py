"""Formats: how each matrix of a checkpoint is stored, as its configuration and headers say.

`read.py` finds the quantisation's configuration (`config_keys.py`) and lets the file of its method
read it (`fp8.py`, `compressed_tensors.py`, `awq.py`, `gptq.py`). Then it compares the result with
the headers of the safetensors files (`headers.py`). The result is a `Formats`, a field of
ModelSpec. The room needs no torch. It knows names, shapes and dtypes of tensors, not how they are
read.
"""
