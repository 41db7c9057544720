"""pdserve: a Ray-native LLM serving cluster with prefill/decode disaggregation.

Nothing is re-exported here: import from the file that defines a name (see
docs/design/architecture.md for the rooms).
"""

__version__ = "0.1.0"
