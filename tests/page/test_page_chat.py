"""The page's chat in a real browser: streams, stops, keys, refusals, deaths of workers, tools,
forms of answers, and answers that attack the page."""

import asyncio
import json
import time

import httpx
import pytest
from page.browser import Browser, missing
from page.conftest import Serve, bodies
from router.harness import MODEL
from support.waiting import until_async as until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() != "", reason=missing() or "all is there"),
]

LONG = " ".join(f"word{number}" for number in range(120))
ASSISTANT = ".assistant .text"
SAID = "#said"
COMPLETE = "The answer is complete."
PROBLEM = ".problem"
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


async def test_an_answer_streams_and_the_conversation_goes_on(
    serve: Serve, browser: Browser
) -> None:
    served = await serve(step_s=0.005)
    served.answers = {"first": LONG, "two\nlines": "Both came."}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("first")
    await browser.shows(ASSISTANT, "word3")
    assert await browser.is_visible("#stop"), "the answer is shown before it is complete"
    assert "word119" not in await browser.text(ASSISTANT)
    await browser.shows(SAID, COMPLETE)
    assert await browser.text(ASSISTANT) == LONG
    assert "tokens/s" in await browser.text(".assistant .meta")
    await browser.fill("#message", "two")
    await browser.press("#message", "Shift+Enter")
    await browser.press("#message", "l")
    await browser.fill("#message", "two\nlines")
    await browser.click("#send")
    await browser.shows(ASSISTANT, "Both came.")
    assert f"first<|im_end|>\n<|im_start|>assistant\n{LONG}<|im_end|>" in served.prompts[-1]
    # a new conversation knows nothing of it
    await browser.click("#forget")
    served.answers["again"] = "Yes."
    await browser.say("again")
    await browser.shows(ASSISTANT, "Yes.")
    assert "first" not in served.prompts[-1] and await browser.count(".turn") == 2


async def test_shift_and_enter_begin_a_line(serve: Serve, browser: Browser) -> None:
    served = await serve()
    await browser.open(served.url)
    await browser.fill("#message", "a")
    await browser.press("#message", "Shift+Enter")
    await browser.press("#message", "b")
    assert await browser.do("values", at="#message") == ["a\nb"]
    assert await browser.count(".turn") == 0


async def test_settings_reach_the_server(serve: Serve, browser: Browser) -> None:
    served = await serve()
    served.answers = {"hi": "Hello."}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.click("#settings summary")
    for field, value in (("temperature", "0"), ("max-tokens", "30"), ("system", "Be brief.")):
        await browser.fill(f"#{field}", value)
    await browser.say("hi")
    await browser.shows(ASSISTANT, "Hello.")
    assert "<|im_start|>system\nBe brief.<|im_end|>" in served.prompts[-1]
    [body] = await bodies(browser)
    assert (body["temperature"], body["max_completion_tokens"], body["stream"]) == (0, 30, True)


async def test_reasoning_is_folded_and_not_sent_again(serve: Serve, browser: Browser) -> None:
    served = await serve()
    served.answers = {"hi": "<think>\nA greeting.\n</think>\n\nHello!", "more": "More."}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("hi")
    await browser.shows(ASSISTANT, "Hello!")
    assert "A greeting" not in await browser.text(ASSISTANT)
    assert await browser.do("attributes", at=".reasoning", name="open") == [None]
    assert not await browser.is_visible(".reasoning > div")
    await browser.click(".reasoning summary")
    assert await browser.text(".reasoning > div") == "A greeting."
    await browser.say("more")
    await browser.shows(ASSISTANT, "More.")
    assert "A greeting" not in served.prompts[-1] and "Hello!" in served.prompts[-1]


@pytest.mark.parametrize("by", ["button", "key"])
async def test_stop_ends_the_request_at_the_server(serve: Serve, browser: Browser, by: str) -> None:
    served = await serve(step_s=0.01)
    served.answers = {"long": "word " * 4000, "more": "It goes on."}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("long")
    await browser.shows(ASSISTANT, "word word word")
    assert served.harness.world.held() > 0
    if by == "button":
        await browser.click("#stop")
    else:
        await browser.press("#message", "Escape")
    await browser.shows(SAID, "Stopped.")
    assert await served.harness.world.settled(5) == 0, "the server goes on"
    assert await browser.is_visible("#send") and not await browser.is_visible("#stop")
    await browser.say("more")
    await browser.shows(ASSISTANT, "It goes on.")
    assert "<|im_start|>assistant\nword word word" in served.prompts[-1]


async def test_a_stop_before_the_first_word_takes_the_message_back(
    serve: Serve, browser: Browser
) -> None:
    served = await serve()
    served.answers = {"never": "x", "more": "It goes on."}
    served.harness.prefills[0].gate = gate = asyncio.Event()
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("never")
    await until(lambda: served.harness.prefills[0].queued)
    await browser.click("#stop")
    await browser.shows(".assistant .meta", "not part of the conversation")
    gate.set()
    assert await served.harness.world.settled(5) == 0
    await browser.say("more")
    await browser.shows(ASSISTANT, "It goes on.")
    assert "never" not in served.prompts[-1]


async def test_a_key_is_asked_for_and_kept_in_this_tab_alone(
    serve: Serve, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_TEST_KEY", "the-key-of-this-test")
    served = await serve(api_key_env="PAGE_TEST_KEY", metrics_need_key=True)
    served.answers = {"hi": "Hello."}
    await browser.open(served.url)
    await browser.shows("#key-said", "an API key is missing")
    assert await browser.do("focused") == "key"
    for wrong, says in (("no-key", "the API key is wrong"), ("schlüssel", "ASCII")):
        await browser.fill("#key", wrong)
        await browser.press("#key", "Enter")
        await browser.shows("#key-said", says)
    await browser.fill("#key", "the-key-of-this-test")
    await browser.click("#key-form button")
    await browser.shows("#model-name", MODEL)
    assert not await browser.is_visible("#key-form")
    await browser.say("hi")
    await browser.shows(ASSISTANT, "Hello.")
    await browser.click("#tab-status")
    await browser.shows("#figures", MODEL)
    # it survives a reload, and is in no place that survives the tab
    await browser.do("reload")
    await browser.shows("#model-name", MODEL)
    assert await browser.do("storage") == [] and await browser.do("cookies") == []
    seen = await browser.seen()
    assert not [each for each in seen["requests"] if "the-key" in each["url"]]
    await browser.open(served.url)
    await browser.shows("#key-said", "an API key is missing")
    # in the status view too, which asks once
    await browser.click("#tab-status")
    await browser.fill("#key", "the-key-of-this-test")
    await browser.press("#key", "Enter")
    await browser.shows("#figures", MODEL)


async def test_too_much_to_do_is_said_and_can_be_tried_again(
    serve: Serve, browser: Browser
) -> None:
    served = await serve(max_concurrent_prompts=1)
    served.answers = {"hi": "Hello.", "other": "x"}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    served.harness.prefills[0].gate = gate = asyncio.Event()
    other = {"model": MODEL, "messages": [{"role": "user", "content": "other"}]}
    async with httpx.AsyncClient(base_url=served.url) as http:
        task = asyncio.create_task(http.post("/v1/chat/completions", json=other))
        await until(lambda: served.harness.prefills[0].queued)
        await browser.say("hi")
        await browser.shows(PROBLEM, "The server has too much to do")
        assert "Try again in 1 second." in await browser.text(f"{PROBLEM} p")
        gate.set()
        assert (await task).status_code == 200
    await browser.click(f"{PROBLEM} button")
    await browser.shows(ASSISTANT, "Hello.")
    assert await browser.count(PROBLEM) == 0 and await browser.count(".turn") == 2
    assert await browser.count(".dropped") == 0


async def test_a_workers_death_is_not_seen_where_another_goes_on(
    serve: Serve, browser: Browser
) -> None:
    served = await serve(step_s=0.005, num_decode=2)
    served.answers = {"long": LONG}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("long")
    await browser.shows(ASSISTANT, "word3")
    running = [worker for worker in served.harness.decodes if worker.held()]
    assert len(running) == 1
    running[0].die()
    await browser.shows(SAID, COMPLETE)
    assert await browser.text(ASSISTANT) == LONG
    other = next(worker for worker in served.harness.decodes if worker is not running[0])
    assert len(other.submits()) == 1, "the other worker has gone on"


async def test_the_last_workers_death_is_said_and_can_be_tried_again(
    serve: Serve, browser: Browser
) -> None:
    served = await serve(step_s=0.005)
    served.answers = {"long": LONG}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("long")
    await browser.shows(ASSISTANT, "word3")
    served.harness.decodes[0].die()
    await browser.shows(PROBLEM, "The answer broke off")
    assert "word3" in await browser.text(".dropped .text"), "what came can still be read"
    await browser.click(f"{PROBLEM} button")
    await browser.shows(PROBLEM, "The server cannot answer now")
    served.teach(served.harness.add("d9", "decode"))
    await until(lambda: served.harness.fleet.decode_workers)
    await browser.click(f"{PROBLEM} button")
    await browser.shows(SAID, COMPLETE)
    assert await browser.text(ASSISTANT) == LONG
    assert await browser.count(".turn") == 2 and await browser.count(PROBLEM) == 0


async def test_a_server_that_is_gone_is_said(serve: Serve, browser: Browser) -> None:
    served = await serve()
    served.answers = {"hi": "Hello.", "more": "More."}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.do("offline", **{"is": True})
    await browser.say("hi")
    await browser.shows(PROBLEM, "The server cannot be reached.")
    await browser.do("offline", **{"is": False})
    # another message instead of the one that failed, which is no part of the conversation
    await browser.say("more")
    await browser.shows(ASSISTANT, "More.")
    assert served.prompts[-1].count("<|im_start|>user") == 1
    assert await browser.count(PROBLEM) == 0


async def test_calls_of_tools_are_shown_and_their_results_sent(
    serve: Serve, browser: Browser
) -> None:
    served = await serve()
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    served.answers = {"weather": f"I look.\n{call}", "rain": "It rains."}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.click("#settings summary")
    for wrong, says in (("[", "is not JSON"), ("{}", "must hold a list")):
        await browser.fill("#tools", wrong)
        await browser.say("weather")
        await browser.shows(SAID, says)
        assert await browser.do("focused") == "tools"
    assert await bodies(browser) == []
    await browser.fill("#tools", json.dumps(TOOLS))
    await browser.click("#settings summary")
    await browser.press("#message", "Enter")
    await browser.shows(".call strong", "get_weather")
    assert json.loads(await browser.text(".call pre")) == {"city": "Köln"}
    await browser.say("something else")
    await browser.shows(SAID, "waits for the results")
    await browser.fill(".call textarea", "rain")
    await browser.click("text=Send the results")
    await browser.shows(ASSISTANT, "It rains.")
    assert "<|im_start|>tool\nrain<|im_end|>" in served.prompts[-1]
    body = (await bodies(browser))[-1]
    asked, result = body["messages"][-2:]
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert await browser.count("text=Send the results") == 0


async def test_a_schema_is_sent_and_what_is_no_json_is_said(serve: Serve, browser: Browser) -> None:
    served = await serve()
    served.answers = {"where": '{"city": "*Köln*"}'}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.click("#settings summary")
    await browser.fill("#schema", '{"type": ')
    await browser.say("where")
    await browser.shows(SAID, "The JSON schema is not JSON")
    await browser.fill("#schema", json.dumps(schema))
    await browser.click("#settings summary")
    await browser.say("where")
    # these workers have no grammar engine, which the server says
    await browser.shows(PROBLEM, "status 400")
    [body] = await bodies(browser)
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert body["response_format"] == wanted


HOSTILE = """<script>alert(1)</script><img src=x onerror="alert(2)">
<svg onload=alert(3)></svg><iframe src="https://evil.example.org/"></iframe>

[click](javascript:alert(4)) [click](JaVaScRiPt:alert(5))
[data](data:text/html,<script>alert(6)</script>)
[tab](java\tscript:alert(7)) [relative](//evil.example.org/x) [good](https://good.example.org/?a="b)
![picture](https://evil.example.org/x.png) <a href="https://evil.example.org" ping="/x">a</a>

# <b onmouseover=alert(8)>heading</b>

- <style>body { background: url(https://evil.example.org/y.png) }</style>
- **<script>alert(9)</script>** and `<script>alert(10)</script>`

```html"><script>alert(11)</script>
<script>alert(12)</script>
```

> <link rel=stylesheet href=https://evil.example.org/z.css> <base href=https://evil.example.org/>
"""


async def test_a_hostile_answer_is_text(serve: Serve, browser: Browser) -> None:
    served = await serve()
    call = {"name": "<img src=x onerror=alert(13)>", "arguments": {"a": "</pre><script>"}}
    served.answers = {"<b>hi</b>": HOSTILE, "think": f"<think>\n{HOSTILE}\n</think>\n\nx"}
    served.answers["call"] = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("<b>hi</b>")
    await browser.shows(SAID, COMPLETE)
    assert await browser.text(".user .text") == "<b>hi</b>"
    shown = await browser.text(ASSISTANT)
    for number in (*range(1, 11), 12):
        assert f"alert({number})" in shown, "it is there, as text"
    made = (
        "script, img, svg, iframe, style, link, base, object, embed, [style], [onload], [onerror]"
    )
    for name in made.split(", "):
        assert await browser.count(f"#log {name}") == 0, name
    assert await browser.do("attributes", at="#log a", name="href") == [
        "https://good.example.org/?a=%22b",
        "https://evil.example.org/x.png",  # of a picture: a link, followed by nobody
    ]
    for rel in await browser.do("attributes", at="#log a", name="rel"):
        assert "noopener" in rel and "noreferrer" in rel
    await browser.say("think")
    await browser.shows(".reasoning summary", "Reasoning")
    await browser.shows(SAID, COMPLETE)
    await browser.click("#settings summary")
    await browser.fill("#tools", json.dumps(TOOLS))
    await browser.click("#settings summary")
    await browser.say("call")
    await browser.shows(".call strong", "onerror")
    for name in made.split(", "):
        assert await browser.count(f"#log {name}") == 0, name
    # the fixture looks for dialogs, requests to others and broken policies


async def test_markdown(serve: Serve, browser: Browser) -> None:
    served = await serve()
    served.answers["show"] = (
        "# Title\nA **bold** and *slanted* `code`, 2 * 3 * 4.\n\n"
        "- one\n- two\n\n3. three\n4. four\n\n```python\nx = '**no**'\n```\n> quoted\n\n**open"
    )
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    await browser.say("show")
    await browser.shows(SAID, COMPLETE)
    found = {
        name: await browser.texts(f"{ASSISTANT} {name}")
        for name in ("h3", "strong", "em", "p code", "ul li", "ol li", "pre", "blockquote")
    }
    assert found == {
        "h3": ["Title"],
        "strong": ["bold"],
        "em": ["slanted"],
        "p code": ["code"],
        "ul li": ["one", "two"],
        "ol li": ["three", "four"],
        "pre": ["x = '**no**'"],
        "blockquote": ["quoted"],
    }
    assert await browser.do("attributes", at=f"{ASSISTANT} ol", name="start") == ["3"]
    assert await browser.texts(f"{ASSISTANT} p") == [
        "A bold and slanted code, 2 * 3 * 4.",
        "**open",
    ]


async def test_signs_without_end_do_not_hang_the_page(serve: Serve, browser: Browser) -> None:
    served = await serve()
    for worker in served.workers:
        worker.tokens_at_once = lambda: 4096
    served.answers["signs"] = "[" * 30_000 + "*a" * 15_000 + "`"
    await browser.open(served.url)
    await browser.shows("#model-name", MODEL)
    began = time.monotonic()
    await browser.say("signs")
    await browser.shows(SAID, COMPLETE)
    assert (await browser.text(ASSISTANT)).endswith("`")
    assert time.monotonic() - began < 20
