"""The cluster on Ray Serve, and the only importer of Ray: deployments, the command line, the Python
client.

`app.py` builds the application, `client.py` speaks to a running one, `cli.py` is the command
`pdserve`. `operate` is what a person calls, `deployments` what runs, `links` how their processes
reach each other, `scaling` how many workers run, `placement` where. Decides nothing about tokens:
routers and workers are given their links and do the rest.
"""
