"""`pdserve chat` against a router with fake workers that serves on loopback, through a
pseudo-terminal and through pipes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chat.terminal import CTRL_C, CTRL_D, UP, Terminal, piped
from router.fake_worker import EOS
from router.harness import MODEL, Harness
from router.turn_models import HERMES, make_speak, tokenizer_of
from support.ports import free_port
from text.backends import byte_level_backend

from pdserve.cluster.deployments.http_server import Address, HttpServer
from pdserve.configs.router import RouterConfig

pytestmark = pytest.mark.processes

# by the last message: what the model answers
ANSWERS = {
    "hi": "<think>\nA greeting.\n</think>\n\nHello\tthere, é 🙂!",
    "odd": "a\u2028b \x1b[31mred",
    "two\nlines": "Both came.",
    "weather": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n'
    "</tool_call>",
    "rain": "It rains.",
    "long": "word " * 400,
    "thinking": "<think>\n" + "hm " * 400,
}
TOOL = {"type": "function", "function": {"name": "get_weather"}}


class Served:
    """A router on a port. Connections go through a relay that can be cut, as a server's death
    does."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.port = free_port()
        self.prompts: list[str] = []
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def run(self) -> AsyncIterator["Served"]:
        await self.harness.start()
        http = HttpServer(self.harness.app, Address("127.0.0.1", 0), 600)
        http.start()
        self._behind = http.port
        self.relay = await asyncio.start_server(self._pass_on, "127.0.0.1", self.port)
        try:
            yield self
        finally:
            self.die()
            await http.close()
            await self.harness.fleet.close()
            await self.harness.world.close()

    def die(self) -> None:
        self.relay.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader_behind, writer_behind = await asyncio.open_connection("127.0.0.1", self._behind)
        self._writers += [writer, writer_behind]

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            except ConnectionError:
                pass
            target.close()

        await asyncio.gather(copy(reader, writer_behind), copy(reader_behind, writer))


Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Makes serve(step_s=..., **RouterConfig fields), a Served whose model answers as ANSWERS
    say."""
    async with AsyncExitStack() as stack:

        async def build(step_s: float = 0.0, **config: Any) -> Served:
            tokenizer = tokenizer_of(HERMES, "<tool_call>", "</tool_call>", "<think>", "</think>")
            router = RouterConfig(**{"split": "always", "worker_silence_s": 600.0, **config})
            harness = Harness(tokenizer, router, 1, 1, 0.3)
            served = Served(harness)
            backend = byte_level_backend("<tool_call>", "</tool_call>", "<think>", "</think>")

            def answer(prompt: tuple[int, ...], choice: int) -> list[int]:
                text = backend.decode(list(prompt), skip_special_tokens=False)
                served.prompts.append(text)
                said = text.split("<|im_start|>")[-2].partition("\n")[2].split("<|im_end|>")[0]
                ids = tokenizer.encode(ANSWERS[said], add_special_tokens=False)
                return [*ids, EOS]

            for worker in (*harness.prefills, *harness.decodes):
                make_speak(worker, tokenizer, "x")
                worker.answers = answer
                worker.step_s = step_s
            return await stack.enter_async_context(served.run())

        yield build


@asynccontextmanager
async def terminal(*arguments: str, **more: str) -> AsyncIterator[Terminal]:
    made = Terminal(*arguments, **more)
    try:
        yield made
    finally:
        made.close()


async def test_a_pipe_gets_the_answer_alone(serve: Serve) -> None:
    served = await serve()
    for more in ((), ("--no-stream",)):
        assert await piped("hi\n", "--url", served.url, *more) == (0, "Hello\tthere, é 🙂!\n", "")
    status, out, _ = await piped("odd", "--url", served.url + "/v1/")
    assert (status, out) == (0, "a\u2028b \x1b[31mred\n")
    status, out, errors = await piped("long", "--url", served.url, "--max-tokens", "9")
    assert status == 0 and out.startswith("word") and "cut off" in errors


async def test_a_pipe_says_what_is_wrong_and_by_its_status(serve: Serve) -> None:
    served = await serve()
    for text, more, code, says in (
        ("", (), 2, "the input is empty"),
        ("hi", ("--model", "other"), 1, "the model 'other' does not exist"),
        ("hi", ("--extra-body", '{"top_p": 7}'), 1, "refused this with status 400: top_p"),
        ("hi", ("--extra-body", "["), 2, "is not JSON"),
        ("hi", ("--extra-body", '{"messages": []}'), 2, "must not set 'messages'"),
        ("hi", ("--temperature", "-1"), 2, "must be a finite number"),
        ("hi", ("--url", "localhost:8000"), 2, "must begin with http://"),
        ("hi", ("--api-key-env", "NO_SUCH_KEY"), 2, "NO_SUCH_KEY is not set"),
        ("hi", ("--url", f"http://127.0.0.1:{free_port()}"), 1, "Nothing answers at http"),
    ):
        status, out, errors = await piped(text, "--url", served.url, *more)
        assert (status, out) == (code, ""), errors
        assert says in errors and "Traceback" not in errors


async def test_a_key_and_a_system_message_reach_the_server(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHAT_TEST_KEY", "secret-of-the-test-0123456789")
    served = await serve(api_key_env="CHAT_TEST_KEY")
    status, _, errors = await piped("hi", "--url", served.url)
    assert status == 1 and "needs an API key, see --api-key-env" in errors
    arguments = ("--url", served.url, "--api-key-env", "CHAT_TEST_KEY", "--system", "Be brief.")
    assert (await piped("hi", *arguments))[:2] == (0, "Hello\tthere, é 🙂!\n")
    assert "<|im_start|>system\nBe brief.<|im_end|>" in served.prompts[-1]


async def test_a_conversation(serve: Serve, tmp_path: Path) -> None:
    served = await serve()
    async with terminal("--url", served.url) as screen:
        await screen.until(f"{MODEL} at {served.url}; /help lists commands.\n> ")
        await screen.ask("hi", "Hello")
        assert "\x1b[2;3mA\x1b[0m" in screen.raw, "reasoning is dimmed"
        await screen.until("é 🙂!\n> ")
        await screen.ask("odd", "\ufffd[31mred\n> ")
        assert "\x1b[31m" not in screen.raw
        assert "hi<|im_end|>\n<|im_start|>assistant\nHello\tthere" in served.prompts[-1]
        assert "A greeting" not in served.prompts[-1]
        # two lines by a backslash, two by pasting, and the last line once more
        screen.type("two\\\r")
        await screen.until("... ")
        await screen.ask("lines", "Both came.\n> ")
        screen.type("\x1b[200~two\nlines\x1b[201~")
        await asyncio.sleep(0.2)
        screen.type("\r")
        await screen.until("Both came.\n> ")
        screen.type(UP * 5 + "\r")
        await screen.until("hi\n")
        await screen.until("é 🙂!\n> ")
        # commands
        await screen.ask("/undo", "Taken back: hi\n> ")
        await screen.ask("/system Be kind.", "The system message is set.\n> ")
        await screen.ask("/save", "needs the name of a file.\n> ")
        file = tmp_path / "talk.json"
        await screen.ask(f"/save {file}", f"Saved to {file}.\n> ")
        await screen.ask(f"/save {file}", "already exists")
        saved = json.loads(file.read_text())
        assert saved["model"] == MODEL
        said = [message["content"] for message in saved["messages"]]
        assert said[:3] == ["Be kind.", "hi", "Hello\tthere, é 🙂!"]
        assert said[-2:] == ["two\nlines", "Both came."] and len(said) == 9
        assert saved["messages"][2]["reasoning_content"] == "A greeting."
        await screen.ask("/reset", "The conversation is forgotten.\n> ")
        await screen.ask("/undo", "There is nothing to take back.\n> ")
        await screen.ask("/what", "/what is no command: /help lists them.\n> ")
        await screen.ask("/help", "Ctrl-C stops an answer")
        await screen.ask("hi", "é 🙂!\n> ")
        assert served.prompts[-1].count("<|im_start|>user") == 1
        assert "system\nBe kind." in served.prompts[-1]
        screen.type("never sent" + CTRL_C)
        await screen.until("> ")
        screen.type(CTRL_D)
        assert await screen.left() == 0
        assert "Traceback" not in screen.text


async def test_calls_are_shown_and_their_results_asked_for(serve: Serve) -> None:
    served = await serve()
    body = json.dumps({"tools": [TOOL]})
    for more in ((), ("--no-stream",)):
        async with terminal("--url", served.url, "--extra-body", body, *more) as screen:
            await screen.until("> ")
            shown = await screen.ask("weather", "result of get_weather> ")
            assert 'I look.\nget_weather({"city": "Köln"})\n' in shown
            await screen.ask("rain", "It rains.\n> ")
            assert "<|im_start|>tool\nrain<|im_end|>" in served.prompts[-1]
            await screen.ask("/quit", "")
            assert await screen.left() == 0


async def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(serve: Serve) -> None:
    served = await serve(step_s=0.01)
    async with terminal("--url", served.url) as screen:
        await screen.until("> ")
        await screen.ask("long", "word word word")
        screen.type(CTRL_C)
        await screen.until("Stopped; the conversation goes on from here.\n> ")
        assert await served.harness.world.settled() == 0, "the server goes on"
        await screen.ask("rain", "It rains.\n> ")
        assert "assistant\nword word word" in served.prompts[-1]
        # of reasoning alone nothing can be kept
        await screen.ask("thinking", "hm hm")
        screen.type(CTRL_C)
        await screen.until("There is no answer; your message was taken back.\n> ")
        await screen.ask("rain", "It rains.\n> ")
        assert "thinking" not in served.prompts[-1] and "word" in served.prompts[-1]
        await screen.ask("/quit", "")
        assert await screen.left() == 0


@pytest.mark.parametrize("streams", [True, False])
async def test_a_server_that_dies_costs_one_message(serve: Serve, streams: bool) -> None:
    served = await serve(step_s=0.01)
    more = () if streams else ("--no-stream",)
    async with terminal("--url", served.url, *more) as screen:
        await screen.until("> ")
        await screen.ask("rain", "It rains.\n> ")
        if streams:
            await screen.ask("long", "word word")
        else:
            await screen.ask("long", "")
            await asyncio.sleep(0.3)
        served.die()
        await screen.until("broke")
        await screen.until("Your message was taken back.\n> ")
        await screen.ask("hi", "Nothing answers at")
        await screen.until("taken back.\n> ")
        served.relay = await asyncio.start_server(served._pass_on, "127.0.0.1", served.port)
        await screen.ask("hi", "🙂!\n> ")
        assert "long" not in served.prompts[-1] and served.prompts[-1].count("user\nhi") == 1
        assert "It rains." in served.prompts[-1]
        await screen.ask("/quit", "")
        assert await screen.left() == 0
        assert "Traceback" not in screen.text


async def test_what_a_server_refuses_is_a_sentence(serve: Serve) -> None:
    served = await serve(max_concurrent_prompts=1, step_s=0.01)
    async with terminal("--url", served.url) as other, terminal("--url", served.url) as screen:
        for each in (other, screen):
            await each.until("> ")
        await other.ask("long", "word word")
        await screen.ask("hi", "The server has too much to do:")
        found = await screen.until("Your message was taken back.\n> ")
        assert " Try again in " in found
        other.type(CTRL_C)
        await other.until("Stopped")
        assert await served.harness.world.settled() == 0
        await screen.ask("hi", "🙂!\n> ")
        await screen.ask("/quit", "")
        assert await screen.left() == 0
