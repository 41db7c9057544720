import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from pdserve.text.chat_template import ChatTemplate
from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def test_encodes_and_decodes_like_the_library(folder: Path, tokenizer: Tokenizer) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    text = "The naïve fox: 你好 🙂"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.encode(text)[0] == 0  # <|bos|>
    assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text).ids[1:]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "<|bos|>" + text
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_special_tokens_and_eos(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    assert tokenizer.eos_token_ids == (2, 1)
    assert tokenizer.special_ids == {0, 1, 2}


def test_eos_comes_from_config_json_without_generation_config(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.load(tmp_path).eos_token_ids == (2, 7)


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path, tmp_path: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert (
        4 < len(Tokenizer.load(tmp_path).encode("The quick brown fox jumps over the lazy dog")) < 64
    )


def test_token_text_and_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == "🙂".encode()
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize("broken", [None, "{", '{"model": 3}'])
def test_a_folder_without_a_readable_tokenizer_is_refused(
    tmp_path: Path, broken: str | None
) -> None:
    if broken is not None:
        (tmp_path / "tokenizer.json").write_text(broken)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_chat_template(tokenizer: Tokenizer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be <kind>"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    text = (
        "<|im_start|>system\nBe "
        "<kind><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(
        text, add_special_tokens=False
    )
    # special tokens of the template become ids
    assert tokenizer.apply_chat_template(messages)[0] == 1
    assert (
        tokenizer.render_chat(messages, add_generation_prompt=False) + "<|im_start|>assistant\n"
        == text
    )
    assert tokenizer.render_chat(messages, not_thinking=True) == text + "<none>"


def test_tool_calls_reach_the_template_as_objects(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "<é>"}'}}
    text = tokenizer.render_chat(
        [{"role": "assistant", "tool_calls": [call]}], tools=[{"type": "function"}]
    )
    assert '{"x": "<é>"}' in text and '[{"type": "function"}]' in text


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ("[" + "[]," * 70_000 + "[]]", 1),
        ('{"a": [1, 2, 3]}', 20_000),
        ("[" * 50_000, 1),
        ('{"a":' * 30_000, 1),
    ],
)
def test_arguments_of_tool_calls_have_a_bound(
    tokenizer: Tokenizer, arguments: str, count: int
) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}] * count
    with pytest.raises(ValueError, match=r"messages\[0\]\.tool_calls.*function\.arguments"):
        tokenizer.render_chat([{"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": 3}], "messages[0].content must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "alien", "content": "x"}], "unknown role alien"),
        (["x"], "messages[0] must be an object"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "not valid JSON",
        ),
        ([{"role": "assistant", "tool_calls": ["f"]}], "tool_calls"),
    ],
)
def test_bad_messages_are_named(tokenizer: Tokenizer, messages: list, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        tokenizer.render_chat(messages)


def test_reserved_names_cannot_be_set(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="raise_exception"):
        tokenizer.render_chat([{"role": "user", "content": "x"}], raise_exception=1)


def test_template_helpers() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% "
        "endfor %}"
    )
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(source).render(two, True, None, {}) == "a"
    assert re.fullmatch(
        r"\d{4}", ChatTemplate("{{ strftime_now('%Y') }}").render([], True, None, {})
    )


def test_templates_are_sandboxed_and_checked() -> None:
    with pytest.raises(ValueError, match="refuses"):
        ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}").render(
            [], True, None, {}
        )
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate("{% if %}")


def test_no_template_is_an_error(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.load(tmp_path).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.processes
def test_the_text_room_imports_no_torch() -> None:
    modules = [f"pdserve.text.{file.stem}" for file in Path("pdserve/text").glob("*.py")]
    assert len(modules) >= 5
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_batches_and_counts_equal_single_texts(tokenizer: Tokenizer) -> None:
    texts = ["", "The naïve fox", "<|bos|>x<|im_end|> \n\n y", "🙂" * 9]
    for add in (True, False):
        alone = [tokenizer.encode(text, add) for text in texts]
        assert tokenizer.encode_batch(texts, add) == alone
        assert [tokenizer.count(text, add) for text in texts] == [len(ids) for ids in alone]


def test_no_token_has_more_characters_than_the_longest(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token >= max(map(len, tokenizer.special_tokens.values()))
    assert all(
        len(tokenizer.decode([i], skip_special_tokens=False)) <= tokenizer.longest_token
        for i in range(tokenizer.vocab_size)
    )


def test_other_threads_run_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    """Seen by how often one runs meanwhile: where the GIL is held, at most once."""
    text = "The quick brown fox " * 50_000

    def turns_meanwhile() -> int:
        turns = 0
        begun = threading.Event()
        done = threading.Event()

        def tick() -> None:
            nonlocal turns
            begun.set()
            while not done.wait(0.001):
                turns += 1

        thread = threading.Thread(target=tick)
        thread.start()
        begun.wait()
        before = turns
        assert tokenizer.count(text) > 100_000
        meanwhile = turns - before
        done.set()
        thread.join()
        return meanwhile

    assert max(turns_meanwhile() for _ in range(3)) > 5, "the GIL was held"


@pytest.mark.processes
def test_tokenising_starts_no_thread_for_each_core(folder: Path) -> None:
    script = (
        "import os, sys\n"
        "from pdserve.text.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(sys.argv[1])\n"
        "t.encode_batch(['a fox'] * 100)\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "1"
