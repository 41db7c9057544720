"""Calibration: what a KV cache in fp8 should be scaled by for a model, and what it costs.

`pdserve calibrate-kv` (`cli.py`) runs a text through the model (`whole_prompts.py`), window by
window (`windows.py`), finds scales and measures them (`kv_scales.py`). Knows no scheduling and no
requests.
"""
