"""vLLM's endpoints of the tokenizer: /tokenize, /detokenize and /tokenizer_info.

Nothing is generated here, and no worker takes part. Used by `router.http.app`.
"""
