"""OpenTelemetry traces of calls, off by default: a root span per call, and below it a span per leg,
made from the timelines of its prompts (docs/use/traces.md).

Knows no workers and no HTTP. Only `otlp` imports OpenTelemetry's library. Only `start` imports
`otlp`, and only when traces are asked for.
"""
