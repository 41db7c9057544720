"""/v1/responses with the shipped demo model, through everything but Ray: grammars enforced by the
engine, calls that the model writes, streams that end with what whole answers are."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from router.responses_support import PATH, checked, comparable, parsed, shown
from support.hosts import Host, hosts
from support.served import DEMO, MODEL, cluster

from pdserve.text.grammars.checker import shared_checker

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oakdale?"}]


class Person(BaseModel):
    name: str
    place: str


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Host]]:
    with hosts(DEMO, "P", "D", engine={"num_kv_blocks": 2048}) as started:
        yield started
    shared_checker().close()


async def test_calls_and_forms_by_openais_client(workers: list[Host]) -> None:
    async with cluster(*workers) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
        asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
        forced = {"type": "function", "name": "get_weather"}
        choices: list[Any] = ["auto", "required", forced]
        for choice in choices:
            answer = await client.responses.create(**asked, input=QUESTION, tool_choice=choice)
            [call] = answer.output
            assert call.type == "function_call" and call.arguments == '{"city": "Oakdale"}'
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        items: Any = [*QUESTION, *answer.output, output]
        again = await client.responses.create(**asked, input=items)
        assert again.status == "completed" and "sunny" in again.output_text
        person = await client.responses.parse(
            model=MODEL,
            input="Tom lives in Oakdale.",
            text_format=Person,
            temperature=0,
            max_output_tokens=100,
        )
        assert isinstance(person.output_parsed, Person)
        await client.close()


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"input": "What is 23 + 54?"}, ["message"]),
        ({"input": QUESTION, "tools": [WEATHER]}, ["function_call"]),
        (
            {"input": "What is 45 + 38?", "chat_template_kwargs": {"enable_thinking": True}},
            ["reasoning", "message"],
        ),
        ({"input": "What is 45 + 38?", "reasoning": {"effort": "none"}}, ["message"]),
    ],
)
async def test_streams_end_with_what_whole_answers_are(
    workers: list[Host], fields: dict[str, Any], kinds: list[str]
) -> None:
    body = {"model": MODEL, "temperature": 0, **fields}
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with cluster(*workers) as served:
        whole = comparable((await served.client.post(PATH, json=body)).json())
        streamed = await served.client.post(PATH, json=body | {"stream": True})
    end = comparable(checked(parsed(streamed.text)))
    for response in (whole, end):  # the second prompt may be in a cache
        response["usage"].pop("input_tokens_details")
    assert whole == end and [kind for kind, _ in shown(whole)] == kinds
