"""Describes the server in OpenAPI. Knows the request types of every dialect, and no workers."""
