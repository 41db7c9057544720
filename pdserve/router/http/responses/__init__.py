"""OpenAI's Responses as a dialect, without a store: POST /v1/responses (docs/use/responses.md).

Knows JSON and checked request objects; no HTTP connection and no workers.
"""
