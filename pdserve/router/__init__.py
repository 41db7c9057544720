"""A router: takes requests over HTTP or from the Python handle, and sees each of them to its end on
some workers.

- `http` is the OpenAI-compatible server.
- `request` takes one request from its prompt to its last token.
- `choosing` decides which workers a request goes to.
- `fleet` holds what is known of the workers.

Each room imports only rooms below it in this list. The router knows no Ray, no engine and no torch:
whoever carries bytes to a worker is passed in (`fleet.link`).
"""
