"""The processes of one engine: `EngineHost` is the first rank's, a `FollowerHost` each other's.

The plain classes under the Ray actors of cluster.deployments.engine_actor; tests run them in a
process without Ray. Know no Ray.
"""
