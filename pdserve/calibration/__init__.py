"""Calibration: finds a model's scales for a KV cache in fp8, and what such a cache costs.

`pdserve calibrate-kv` (`cli.py`) runs a text through the model (`whole_prompts.py`), window by
window (`windows.py`). It finds scales and measures their cost (`kv_scales.py`). This package knows
no scheduling and no requests.
"""
