"""The command `pdserve bench`: the speed of one engine in this process, and HTTP load on any
OpenAI-compatible server.

`offline.py` measures an engine through `LLM`, and `load.py` a server over HTTP. `workload.py` makes
what they ask for, and `record.py` keeps results. Knows no Ray and no part of a server: it sees what
a user sees. The comparisons of this repository are in `benchmarks/`, which uses these files.
"""
