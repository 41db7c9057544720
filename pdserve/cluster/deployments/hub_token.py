"""Passes the Hub's token from `pdserve up` to the processes that download, through Ray's key-value
store.

If the token were in the environment of Ray's jobs and actors, the dashboard would show it and logs
would contain it. If it were in cluster.yaml, it would some day be in a repository. The store is in
the memory of Ray's head (and in its Redis, if it has one), and whoever can read it can run code
there anyway. Each process that takes the token puts it into its own HF_TOKEN, where the Hub's
library looks. The calls block. Written by `cluster.operate.up`; taken by `router_replica` and
`engine_actor`.
"""

import os

from ray.experimental import internal_kv

NAMESPACE = "pdserve-hub"
VARIABLE = "HF_TOKEN"


def post(application: str, token: str) -> None:
    """Stores the token for all processes of the application that start from now on."""
    internal_kv._internal_kv_put(application, token.encode(), namespace=NAMESPACE)


def remove(application: str) -> None:
    internal_kv._internal_kv_del(application, namespace=NAMESPACE)


def take(application: str) -> None:
    """Lets this process use the stored token, if there is one, instead of its node's token."""
    if (token := internal_kv._internal_kv_get(application, namespace=NAMESPACE)) is not None:
        os.environ[VARIABLE] = token.decode()
