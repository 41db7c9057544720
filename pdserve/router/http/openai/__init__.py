"""OpenAI's dialect: requests, answers and the document that describes both.

Knows JSON and checked request objects; no HTTP connection and no workers.
"""
