"""Anthropic's Messages API: POST /v1/messages and POST /v1/messages/count_tokens.

`requests` has the fields of a body; `conversation` and `tools` turn them into a Turn's. `responder`
writes answers, `errors` has the form of errors, and `routes` says which paths exist.
"""
