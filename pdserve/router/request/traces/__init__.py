"""OpenTelemetry traces of calls, off by default: a root span for each call, below it a span for
each leg, made from the timelines of its prompts (docs/use/traces.md).

Knows no workers and no HTTP. Only `otlp` imports OpenTelemetry's library, and only `start` imports
`otlp`, when traces are asked for.
"""
