"""`pdserve chat`: a conversation in a terminal with a running cluster, over its HTTP endpoint.

`cli` has the options, `server` speaks HTTP, `conversation` holds the messages, `screen` writes, and
`session` joins them. Works with any OpenAI-compatible server. Knows no Ray and no engine.
"""
