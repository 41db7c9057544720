"""A router: takes requests over HTTP or from the Python handle, and sees each of them to its end on
some workers.

`http` is the OpenAI-compatible server, `request` one request from its prompt to its last token,
`choosing` which workers it goes to, `fleet` what is known of the workers. Imports go this way only.
Knows no Ray, no engine and no torch: who carries bytes to a worker is given (`fleet.link`).
"""
