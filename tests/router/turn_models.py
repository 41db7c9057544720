"""Models that call tools, as a router sees them: a tokenizer, a chat template, and answers that the
test writes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from router.fake_worker import EOS, FakeWorker
from router.harness import MODEL, Harness
from text.backends import byte_level_backend

from pdserve.configs.router import RouterConfig
from pdserve.text.tokenizer import Tokenizer

Say = Callable[..., Any]  # the fixture `say`

# as Qwen3 writes it, as far as these tests look
HERMES = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- if documents %}{% for d in documents %}[{{ d.title }}]{% endfor %}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% if enable_thinking is false %}<think>

</think>

{% endif %}{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}{% endif %}"""

MISTRAL = """{%- for message in messages %}[INST]{{ message.content }}[/INST]
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('an id needs nine characters') }}{% endif %}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}{% endfor %}{{ tools | tojson }}"""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
MESSAGES: list[Any] = [{"role": "user", "content": "What is it like?"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER, CLOCK]}


def tokenizer_of(template: str, *delimiters: str, special: bool = False) -> Tokenizer:
    backend = byte_level_backend(*delimiters, special=special)
    names = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    return Tokenizer(backend, names, (EOS,), template)


def speaking(
    tokenizer: Tokenizer,
    *answers: str,
    tokens_at_once: Callable[[], int] = lambda: 1,
    num_prefill: int = 1,
    num_decode: int = 1,
    **config: Any,
) -> Harness:
    """A router whose workers give these answers, one a choice; the model then ends by itself."""
    router = RouterConfig(**{"split": "always", "worker_silence_s": 600.0, **config})
    harness = Harness(tokenizer, router, num_prefill, num_decode, 0.3)
    for worker in (*harness.prefills, *harness.decodes):
        make_speak(worker, tokenizer, *answers)
        worker.tokens_at_once = tokens_at_once
    return harness


def make_speak(worker: FakeWorker, tokenizer: Tokenizer, *answers: str) -> None:
    ids = [[*tokenizer.encode(answer, add_special_tokens=False), EOS] for answer in answers]
    worker.answers = lambda prompt, choice: ids[choice % len(ids)]
    worker.vocab_size = tokenizer.vocab_size
    worker.max_tokens = 100_000


def some_at_once(seed: int) -> Callable[[], int]:
    """Random numbers of tokens in a step, from 1 to 7."""
    draw = random.Random(seed)
    return lambda: draw.randint(1, 7)


async def whole(harness: Harness, **fields: Any) -> dict[str, Any]:
    answer = await harness.http().post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def streamed(harness: Harness, **fields: Any) -> list[Any]:
    """All chunks, as OpenAI's client reads them."""
    extra = {name: fields.pop(name) for name in list(fields) if name not in _OPENAIS}
    client = harness.openai()
    stream = await client.chat.completions.create(
        **CHAT | fields, stream=True, extra_body=extra or None
    )
    return [chunk async for chunk in stream]


_OPENAIS = {
    *("tools", "tool_choice", "messages", "n", "seed", "stop", "logprobs", "top_logprobs"),
    *("max_tokens", "stream_options", "parallel_tool_calls", "reasoning_effort"),
}


def message_of(chunks: Sequence[Any], index: int = 0) -> tuple[dict[str, Any], str | None]:
    """Puts the deltas of one choice together as a client does; returns the message and its reason.

    Checks the order that clients rely on.
    """
    message: dict[str, Any] = {}
    reason = None
    own = [c for chunk in chunks for c in chunk.choices if c.index == index]
    assert own[0].delta.role == "assistant" and not any(c.delta.role for c in own[1:])
    for choice in own:
        assert reason is None, "a delta behind the end"
        delta = choice.delta.model_dump(exclude_unset=True)
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls") or ():
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["type"] == "function" and call["id"] and call["function"]["name"]
                function = {"name": call["function"]["name"], "arguments": ""}
                calls.append({"id": call["id"], "type": "function", "function": function})
            else:
                assert set(call) == {"index", "function"} == {*call, "function"}
                assert set(call["function"]) == {"arguments"}
            assert call["index"] == len(calls) - 1, "calls come one after the other"
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice.finish_reason
    assert reason is not None
    return message, reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Comparable: ids of calls are random; what is empty is left out."""
    calls = message.get("tool_calls") or []
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    shown = {name: value for name, value in message.items() if value and name != "role"}
    return shown | (
        {"tool_calls": [(c["function"]["name"], c["function"]["arguments"]) for c in calls]}
        if calls
        else {}
    )
