"""LlamaIndex's OpenAILike: chat, tools, its agent and its structured programs."""

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
    WEATHER_ABOUT,
    WEATHER_ANSWER,
    WEATHER_NAME,
    WEATHER_RESULT,
    WEATHER_WORDS,
    Place,
    is_weather_call,
)
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture
def llm(url: str) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_retries=0,
        context_window=2048,
    )


@pytest.fixture
def asked() -> list[str]:
    """The cities of which the tool was asked."""
    return []


@pytest.fixture
def weather(asked: list[str]) -> FunctionTool:
    def get_weather(city: str) -> str:
        asked.append(city)
        return WEATHER_RESULT

    return FunctionTool.from_defaults(get_weather, name=WEATHER_NAME, description=WEATHER_ABOUT)


def test_text_and_stream(llm: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content=SUM_WORDS)]
    assert llm.chat(messages).message.content == SUM_ANSWER
    deltas = [answer.delta for answer in llm.stream_chat(messages)]
    assert len(deltas) > 3 and "".join(delta or "" for delta in deltas) == SUM_ANSWER


def test_completion(llm: OpenAILike) -> None:
    completing = llm.model_copy(update={"is_chat_model": False})
    answer = completing.complete("45 + 38 =", max_tokens=3)
    assert answer.text.split()[0] == "83"


def test_a_tool_is_chosen(llm: OpenAILike, weather: FunctionTool) -> None:
    answer = llm.chat_with_tools([weather], user_msg=WEATHER_WORDS)
    [call] = llm.get_tool_calls_from_response(answer)
    assert is_weather_call(call.tool_name, call.tool_kwargs)


def test_a_call_in_a_stream(llm: OpenAILike, weather: FunctionTool) -> None:
    *_, last = llm.stream_chat_with_tools([weather], user_msg=WEATHER_WORDS)
    [call] = llm.get_tool_calls_from_response(last)
    assert is_weather_call(call.tool_name, call.tool_kwargs)


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_agent_runs_a_tool_and_reports(
    llm: OpenAILike, weather: FunctionTool, asked: list[str], streaming: bool
) -> None:
    agent = FunctionAgent(tools=[weather], llm=llm, streaming=streaming)
    answer: Any = await agent.run(WEATHER_WORDS)
    assert asked == [CITY]
    assert answer.response.content == WEATHER_ANSWER


def test_a_program_makes_an_object_by_a_call(llm: OpenAILike) -> None:
    program = FunctionCallingProgram.from_defaults(
        output_cls=Place, llm=llm, prompt_template_str="{words}", tool_required=True
    )
    assert program(words=PLACE_WORDS) == Place(**PLACE)


def test_a_structured_answer(llm: OpenAILike) -> None:
    """By a call again, which is what a structured LLM does with models that call functions."""
    answer = llm.as_structured_llm(Place).chat([ChatMessage(role="user", content=PLACE_WORDS)])
    assert answer.raw == Place(**PLACE)
