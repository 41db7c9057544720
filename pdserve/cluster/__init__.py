"""The cluster on Ray Serve: deployments, the command line and the Python client.

This is the only room that imports Ray. `app.py` builds the application, `client.py` talks to a
running one, and `cli.py` is the command `pdserve`. `operate` holds what a person calls,
`deployments` what runs, `links` how the processes reach each other, `scaling` how many workers run,
and `placement` where they run. Nothing here decides about tokens: routers and workers are given
their links and do the rest.
"""
