"""The names of our Serve deployments."""

ROUTER = "Router"
# key in the configuration -> deployment
DEPLOYMENTS: dict[str, str] = {"prefill": "Prefill", "decode": "Decode"}
