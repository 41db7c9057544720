"""The AI SDK (JavaScript): text, objects, tools over each dialect. ai_sdk.mjs asks; here is what
must come out."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients.asks import (
    CITY,
    KEY,
    MODEL,
    PLACE,
    PLACE_WORDS,
    SUM_ANSWER,
    SUM_WORDS,
    THINK_WORDS,
    THOUGHT,
    WEATHER_ANSWER,
    WEATHER_NAME,
    WEATHER_RESULT,
    WEATHER_WORDS,
)

HERE = Path(__file__).parent
ASKS = {
    "model": MODEL,
    "key": KEY,
    "sum_words": SUM_WORDS,
    "think_words": THINK_WORDS,
    "place_words": PLACE_WORDS,
    "weather_words": WEATHER_WORDS,
    "weather_result": WEATHER_RESULT,
}
TIMEOUT_S = 120

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (HERE / "node_modules" / "ai").is_dir(),
    reason="needs node and the packages of tests/clients/package.json (npm install)",
)


@pytest.fixture(params=["chat", "responses", "messages"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(url: str, case: str, dialect: str) -> dict[str, Any]:
    """Returns the output of a case of ai_sdk.mjs."""
    environment = {**os.environ, "ASKS": json.dumps(ASKS)}
    ran = subprocess.run(
        ["node", "ai_sdk.mjs", url, case, dialect],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_text(url: str, dialect: str) -> None:
    found = ask(url, "text", dialect)
    assert (found["text"], found["reason"]) == (SUM_ANSWER, "stop")
    usage = found["usage"]
    assert usage["totalTokens"] == usage["inputTokens"] + usage["outputTokens"] > 10


def test_stream(url: str, dialect: str) -> None:
    found = ask(url, "stream", dialect)
    assert len(found["pieces"]) > 2 and "".join(found["pieces"]) == SUM_ANSWER
    assert found["reason"] == "stop" and found["usage"]["outputTokens"] > 5


def test_reasoning(url: str, dialect: str) -> None:
    found = ask(url, "reasoning", dialect)
    assert found["text"] == SUM_ANSWER
    if dialect != "responses":  # there OpenAI's provider reads summaries alone
        assert found["reasoning"] == THOUGHT


def test_an_object(url: str, dialect: str) -> None:
    assert ask(url, "object", dialect)["object"] == PLACE
    assert ask(url, "object_of_text", dialect)["object"] == PLACE


def test_an_object_in_a_stream(url: str, dialect: str) -> None:
    found = ask(url, "object_stream", dialect)
    assert found["object"] == PLACE and found["states"][-1] == PLACE


def test_the_loop_of_the_sdk_runs_a_tool(url: str, dialect: str) -> None:
    found = ask(url, "tool", dialect)
    assert found == {"text": WEATHER_ANSWER, "cities": [CITY], "steps": 2}


def test_the_loop_of_the_sdk_runs_a_tool_in_a_stream(url: str, dialect: str) -> None:
    found = ask(url, "tool_stream", dialect)
    assert (found["text"], found["cities"]) == (WEATHER_ANSWER, [CITY])
    kinds = found["kinds"]
    # as they are generated; over messages each member once it is whole
    assert kinds.count("tool-input-delta") >= (2 if dialect == "messages" else 3)
    assert kinds.count("tool-call") == kinds.count("tool-result") == 1 and "error" not in kinds


def test_a_call_that_must_be_made(url: str, dialect: str) -> None:
    [(name, arguments)] = ask(url, "required", dialect)["calls"]
    assert name == WEATHER_NAME and isinstance(arguments["city"], str)
