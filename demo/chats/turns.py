"""The parts of a chat exactly as the chat template writes them: tools, turns, calls, results,
reasoning.

Written here a second time, since jinja is too slow for 10^9 tokens; tests/demo/test_template.py
compares the two. Called by the generators of chats and by demo/skills.py.
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
    """The system part: `content`, then the schemas of the tools, one a line; "" without both."""
    if not tools:
        return f"{SYSTEM}{content}{END}" if content else ""
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    between = "\n\n" if content else ""
    return f"{SYSTEM}{content}{between}{TOOLS_HEAD}{schemas}{TOOLS_END}{END}"


def user_turn(content: str) -> str:
    return f"{USER}{content}{END}"


def reply_turn(content: str) -> str:
    """An assistant's turn; what stands after <|assistant|> is what the model generates."""
    return f"{ASSISTANT}{content}{END}"


def results_turn(results: Sequence[str]) -> str:
    """The contents of successive `tool` messages, which the template writes as one user turn."""
    return user_turn("\n".join(f"{RESULT}\n{result}\n{RESULT_END}" for result in results))


def calls_text(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'{CALL}\n{{"name": "{call.name}", "arguments": '
        f"{json.dumps(call.arguments, ensure_ascii=False)}}}\n{CALL_END}"
        for call in calls
    )


def thought_text(lines: Sequence[str]) -> str:
    """Reasoning of these lines, up to where the answer begins."""
    return f"{THINK}\n" + "\n".join(lines) + f"\n{THINK_END}\n\n"
