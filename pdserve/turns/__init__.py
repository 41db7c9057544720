"""Turns: one step of a conversation, in no API's form: messages, tools and sampling in, pieces out.

Every dialect makes a `turn` (chat completions, the Python client, `LLM.chat`). `tool_checks` checks
tools and the choice of them. `model_turns` knows one model: its prompts, how its answers are read,
and what has to be enforced. `enforcement` makes the grammars. Knows no HTTP, no workers and no
engine.
"""
