"""The names of pdserve's Serve deployments."""

ROUTER = "Router"
# Key in the configuration -> name of the deployment.
DEPLOYMENTS: dict[str, str] = {"prefill": "Prefill", "decode": "Decode"}
