"""OpenAI's dialect: requests, answers, and the parts of the document that describe both.

Knows JSON and checked request objects; no HTTP connection and no workers.
"""
