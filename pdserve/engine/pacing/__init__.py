"""Decides how long a step may take, so that running streams keep their promised pace and prompts
get the rest (docs/design/pacing.md).

Pure arithmetic on counts and seconds; the clock is passed in. Knows no sequences, queues, blocks or
devices. The scheduler asks it, and the engine reports the end of each step.
"""
