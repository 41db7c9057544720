"""Answers drawn at random from grammars of JSON schemas are all valid: the rule that this package
must hold. The walks go where a schema could be got round, to escapes, quotes and keys that were
there already. tests/text/grammars/drawing.py draws the schemas."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher
from text.grammars.drawing import KEYS, Draw, is_valid, judge, read
from text.grammars.support import accepts

from pdserve.text.answers.formats import CALL_FORMATS
from pdserve.text.answers.parser import AnswerParser
from pdserve.text.answers.pieces import CallArguments
from pdserve.text.grammars.probe import Check, Make, answer, matcher_of
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.grammars.tools import tools_grammar

EOS = 256
FAVOURITES = b'"\\"\\u{}[],:0129.-eEabx!/n'
ENDS = b'"}]'
WALKS = 4


def walk(grammar: str, rng: random.Random, length: int = 60) -> str | None:
    """One answer, byte by byte; None when it finds no end in time. After `length` bytes it prefers
    what may lead to the end."""
    matcher = _prototype(grammar).deep_copy()
    text = b""
    while len(text) < 6 * length:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [byte for byte in range(257) if mask[byte // 8] >> byte % 8 & 1]
        assert allowed, f"nothing may follow {text!r}"
        hurries = len(text) > length
        if EOS in allowed and (len(allowed) == 1 or rng.random() < (0.9 if hurries else 0.3)):
            return text.decode()
        if ord('"') in allowed and not hurries and rng.random() < 0.3:
            more = rng.choice(list(keys_again(text)))
        else:
            more = bytes([_pick([byte for byte in allowed if byte < EOS], rng, hurries)])
        text += more[: matcher.try_consume_tokens(list(more))]
    return None


def keys_again(text: bytes) -> Iterator[bytes]:
    """Keys that might be written a second time, plainly and with escapes."""
    for key in [*KEYS, *text.decode(errors="ignore").split('"')[1::2]]:
        yield json.dumps(key, ensure_ascii=False).encode() + b":"
        yield b'"' + b"".join(b"\\u%04x" % ord(char) for char in key[:1]) + key[1:].encode() + b'"'
        yield json.dumps(key).replace("\\u", "\\U").encode() + b": 1"


def _pick(allowed: list[int], rng: random.Random, hurries: bool) -> int:
    wanted = [byte for byte in allowed if byte in (ENDS if hurries else FAVOURITES)]
    return rng.choice(wanted if wanted and rng.random() < 0.8 else allowed)


_prototypes: dict[str, LLMatcher] = {}


def _prototype(grammar: str) -> LLMatcher:
    if grammar not in _prototypes:
        _prototypes.clear()
        _prototypes[grammar] = matcher_of(grammar)
    return _prototypes[grammar]


def check(schema: Any, seed: int, walks: int = WALKS) -> int:
    """Judges some answers of the schema's grammar by all keywords that are not reported. Returns
    how many there were."""
    finding = answer(Make(StructuredRequest("json", schema, "f")))
    if finding.error:
        return 0
    found = [walk(finding.text, random.Random(seed * 100 + i)) for i in range(walks)]
    texts = [text for text in found if text is not None]
    judged(texts, schema, finding.unenforced)
    return len(texts)


def judged(texts: list[str], schema: Any, unenforced: tuple[str, ...]) -> None:
    validator = judge(schema, [name.split(" ")[0] for name in unenforced])
    for text in texts:
        if not is_valid(validator, read(text)):
            pytest.fail(f"{text} does not follow {json.dumps(schema)} ({unenforced})")


def check_calls(schema: Any, form_name: str, seed: int, walks: int = WALKS) -> int:
    """Does the same as `check` with the arguments of calls, as their parser reads them."""
    calls = CALL_FORMATS[form_name]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    try:
        grammar = tools_grammar(calls.form, tools, "required", parallel=False)
    except ValueError:
        return 0
    finding = answer(Check(grammar, "tools"))
    if finding.error:
        return 0
    texts = []
    for i in range(walks):
        if (text := walk(grammar, random.Random(seed * 100 + i), 120)) is not None:
            parser = AnswerParser(calls, tools={"f": schema})
            pieces = [*parser.push([text]), *parser.finish()]
            texts.append("".join(p.text for p in pieces if isinstance(p, CallArguments)))
    judged(texts, schema, finding.unenforced)
    return len(texts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
def test_answers_are_valid(seed: int) -> None:
    num_answers = sum(check(Draw(100 * seed + i).root(), seed) for i in range(15))
    assert num_answers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form_name", ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("seed", range(10))
def test_arguments_of_calls_are_valid(seed: int, form_name: str) -> None:
    schemas = [Draw(100 * seed + i).arguments() for i in range(15)]
    assert sum(check_calls(schema, form_name, seed) for schema in schemas)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_keep_their_bounds(seed: int) -> None:
    num_answers = 0
    for i in range(20):
        schema, near = Draw(100 * seed + i).bounds()
        finding = answer(Make(StructuredRequest("json", schema, "f")))
        if not finding.error:
            texts = [text for text in near if accepts(finding.text, text)]
            texts += filter(None, (walk(finding.text, random.Random(j), 20) for j in range(4)))
            judged(texts, schema, finding.unenforced)
            num_answers += len(texts)
    assert num_answers > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_answers_are_valid(seed: int) -> None:
    assert sum(check(Draw(100 * seed + i).root(), seed, 12) for i in range(50)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("form_name", sorted(CALL_FORMATS))
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_arguments_of_many_calls_are_valid(seed: int, form_name: str) -> None:
    schemas = [Draw(100 * seed + i).arguments() for i in range(50)]
    assert sum(check_calls(schema, form_name, seed, 8) for schema in schemas) > 50
