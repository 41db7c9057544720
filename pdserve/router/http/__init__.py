"""The HTTP server of a router: bodies in, server-sent events and JSON out, API keys, operators'
routes.

Speaks to no worker: requests go through `router.request.service`, operators' routes through
`router.admin`; `/health` and `/v1/models` look at the fleet.
"""
