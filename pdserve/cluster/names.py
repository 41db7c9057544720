"""The names of our Serve deployments."""

ROUTER = "Router"
DEPLOYMENTS: dict[str, str] = {"prefill": "Prefill", "decode": "Decode"}  # key in the configuration -> deployment
