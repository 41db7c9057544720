"""vLLM's endpoints of the tokenizer: /tokenize, /detokenize and /tokenizer_info.

Nothing is generated here, and no worker hears of it. Used by `router.http.app`.
"""
