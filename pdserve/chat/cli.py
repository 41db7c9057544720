"""Defines and runs the options of `pdserve chat`.

No HTTP client is imported before the command runs, so that `pdserve --help` stays quick. Called by
`cluster.cli`.
"""

import argparse
import json
import math
import os
import sys
from typing import Any

from pdserve.bench.option_values import POSITIVE, integer, shown

DEFAULT_URL = "http://127.0.0.1:8000"
# Fields of a request that the command itself sets.
_OWN = ("messages", "model", "stream", "n")


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk to the model of a running server. In a terminal, /help lists commands. Input from a "
        "pipe is one message, and only the answer is printed."
    )
    parser.add_argument(
        "--url", "--base-url", type=shown(_url), default=DEFAULT_URL, help=f"default {DEFAULT_URL}"
    )
    parser.add_argument("--model", help="model's name at the server (default: its first one)")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the API key"
    )
    parser.add_argument("--temperature", type=shown(_temperature), help="default: the model's own")
    parser.add_argument("--max-tokens", type=integer(1), help="longest answer, in tokens")
    parser.add_argument(
        "--no-stream", action="store_true", help="show each answer when it is complete"
    )
    parser.add_argument(
        "--extra-body",
        type=shown(_extra_body),
        default={},
        metavar="JSON",
        help="JSON to add to each request, such as "
        """'{"chat_template_kwargs": {"enable_thinking": true}}'""",
    )
    parser.add_argument(
        "--timeout",
        type=POSITIVE,
        default=600.0,
        help="seconds to wait for more of an answer (default 600)",
    )


def run_chat(options: argparse.Namespace) -> int:
    """Runs the command and returns the exit status: 1 if the server did not answer.

    Raises a ValueError that says what is wrong with the options.
    """
    from pdserve.chat.server import Server, ServerError
    from pdserve.chat.session import run_once, run_terminal

    key = None
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            raise ValueError(
                f"--api-key-env: the variable {options.api_key_env} is not set: export the key in "
                "it"
            )
    body: dict[str, Any] = dict(options.extra_body)
    for name in ("temperature", "max_tokens"):
        if getattr(options, name) is not None:
            body[name] = getattr(options, name)
    try:
        with Server(options.url, options.model, key, body, options.timeout) as server:
            run = run_terminal if sys.stdin.isatty() and sys.stdout.isatty() else run_once
            return run(server, options.system, not options.no_stream)
    except ServerError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"must begin with http:// or https://, not {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"must be a finite number, at least 0, not {text!r}")
    return value


def _extra_body(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error}): {text!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {text!r}")
    for name in _OWN:
        if name in value:
            raise ValueError(f"must not set {name!r}: this command sets it")
    return value
