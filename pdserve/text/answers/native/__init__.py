"""Native forms: how each family of models writes tool calls.

A file has the parser of a form and the form's description for grammars (`call_form`). It names the
source that both follow. A parser is a generator over a `Scan`. `answers.formats` lists the formats
by name. This package knows no requests.
"""
