"""OpenAI's /v1/embeddings: takes texts or token ids, and returns one vector for each.

Knows no workers. Used by `router.http.app`.
"""
