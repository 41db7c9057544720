"""Checks who may ask, and how: API keys, this server's names, other origins, and kinds of bodies.

Knows no paths and no request's fields. Used by `router.http.app` and `router.http.endpoints`.
"""
