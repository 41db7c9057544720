"""The HTTP server of a router: bodies in, server-sent events and JSON out, API keys, operators'
routes.

Knows no workers: everything about a request is `router.request.service`.
"""
