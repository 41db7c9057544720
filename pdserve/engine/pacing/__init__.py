"""How long a step may take, so that running streams keep their promised pace and prompts get the
rest (docs/design/pacing.md).

Pure arithmetic on counts and seconds, with a clock that is passed in. Knows no sequences, queues,
blocks or devices; the scheduler asks it, and the engine tells it when steps end.
"""
