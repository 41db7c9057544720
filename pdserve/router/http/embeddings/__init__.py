"""OpenAI's /v1/embeddings: texts or token ids in, one vector for each out."""
