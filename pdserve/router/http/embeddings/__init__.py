"""OpenAI's /v1/embeddings: texts or token ids in, one vector for each out.

Knows no workers. Used by `router.http.app`.
"""
