"""Writes the parts of a chat exactly as the chat template does: tools, turns, calls, results,
reasoning.

This is a second implementation, because jinja is too slow for 10^9 tokens.
tests/demo/test_template.py compares the two. The generators of chats and demo/skills.py call this
module.
"""

import json
from collections.abc import Sequence

from demo.chats.tools import Call, Tool
from demo.data import (
    ASSISTANT,
    CALL,
    CALL_END,
    END,
    RESULT,
    RESULT_END,
    SYSTEM,
    THINK,
    THINK_END,
    USER,
)

TOOLS_HEAD = "You may call these functions:\n<tools>\n"
TOOLS_END = "\n</tools>"


def system_turn(content: str, tools: Sequence[Tool] = ()) -> str:
    """Writes the system part: `content`, then the schemas of the tools, one per line. Without both
    it is ""."""
    if not tools:
        return f"{SYSTEM}{content}{END}" if content else ""
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    between = "\n\n" if content else ""
    return f"{SYSTEM}{content}{between}{TOOLS_HEAD}{schemas}{TOOLS_END}{END}"


def user_turn(content: str) -> str:
    return f"{USER}{content}{END}"


def reply_turn(content: str) -> str:
    """Writes an assistant's turn. The model generates what follows <|assistant|>."""
    return f"{ASSISTANT}{content}{END}"


def results_turn(results: Sequence[str]) -> str:
    """Writes the contents of successive `tool` messages, which become one user turn."""
    return user_turn("\n".join(f"{RESULT}\n{result}\n{RESULT_END}" for result in results))


def calls_text(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'{CALL}\n{{"name": "{call.name}", "arguments": '
        f"{json.dumps(call.arguments, ensure_ascii=False)}}}\n{CALL_END}"
        for call in calls
    )


def thought_text(lines: Sequence[str]) -> str:
    """Writes reasoning of these lines, up to the beginning of the answer."""
    return f"{THINK}\n" + "\n".join(lines) + f"\n{THINK_END}\n\n"
