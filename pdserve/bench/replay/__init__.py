"""The commands `pdserve bench replay` and `replay-page`: recorded traffic, sent again to any
OpenAI-compatible server.

- `trace_lines.py` and `trace.py` read a trace.
- `window.py` takes a part of it at a rate, and `prompts.py` makes its prompts.
- `send.py` sends it in an open loop, and `figures.py` judges the answers.
- `store.py` keeps results in a file, and `sweep.py` goes through rates and resumes.
- `table.py`, `charts.py` and `page.py` show results, and `commands.py` has the options.

Knows no Ray, no torch and no part of a server.
"""
