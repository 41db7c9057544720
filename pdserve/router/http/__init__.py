"""The HTTP server of a router: request bodies come in, JSON and server-sent events go out. It also
checks API keys and has operators' routes.

Speaks to no worker: requests go through `router.request.service`, and operators' routes through
`router.admin`. `/health` and `/v1/models` look at the fleet.
"""
