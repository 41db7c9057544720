"""The processes of one engine: `EngineHost` for the first rank, a `FollowerHost` for each other
rank.

They are the plain classes under the Ray actors of cluster.deployments.engine_actor; tests run them
in a process without Ray. They know no Ray.
"""
