"""Who may ask, from where: API keys, names of this server, other origins, and kinds of bodies.

Knows no paths and no request's fields. Used by `router.http.app` and `router.http.endpoints`.
"""
