"""The Hub's token on its way from `pdserve up` to the processes that download: through Ray's own
key-value store.

A token in the environment of Ray's jobs and actors would be shown by the dashboard and written into
logs, and one in cluster.yaml would be in a repository some day. The store is in the memory of Ray's
head (and in its Redis, if it has one), and whoever can read it can run code there anyway. Each
process that takes it has it in its own HF_TOKEN, where the Hub's library looks. Blocking calls.
Written by `cluster.operate.up`; taken by `router_replica` and `engine_actor`.
"""

import os

from ray.experimental import internal_kv

NAMESPACE = "pdserve-hub"
VARIABLE = "HF_TOKEN"


def post(application: str, token: str) -> None:
    """For all processes of the application that start from now on."""
    internal_kv._internal_kv_put(application, token.encode(), namespace=NAMESPACE)


def remove(application: str) -> None:
    internal_kv._internal_kv_del(application, namespace=NAMESPACE)


def take(application: str) -> None:
    """Let this process use the token, if there is one: instead of its node's."""
    if (token := internal_kv._internal_kv_get(application, namespace=NAMESPACE)) is not None:
        os.environ[VARIABLE] = token.decode()
