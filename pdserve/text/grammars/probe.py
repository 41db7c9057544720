"""A process of its own that builds grammars and says whether they can be used.

llguidance may take seconds over a hostile grammar, or overflow the stack, which ends the process;
here that costs nobody else anything. Reads frames from stdin and answers on stdout until stdin is
closed: 4 bytes of length, then msgpack. A thread with a small stack builds, so that what passes
here fits the stack of any engine. Run by `checker` as `python -m pdserve.text.grammars.probe`.
"""

import re
import sys
import threading
from typing import BinaryIO

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

STACK_BYTES = 1 << 22  # half of what a thread has by default
_EOS = 256
_ANY = 257  # stands for every token that a grammar names by its id
_NAMES = re.compile(r"<[^<>\[\]\s\"'\\]{1,128}>")
_IDS = re.compile(r"<\[[0-9,\- ^]+\]>")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_NO_FORMAT = re.compile(r"Unknown format: (.*)")


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """error: why the grammar cannot be used; "" if it can. unenforced: JSON schema's keywords that
    it leaves out, with the format's name where it is one."""

    error: str
    unenforced: tuple[str, ...]


class Bytes:
    """A tokenizer of bytes with the special tokens that a grammar names, as llguidance wants it."""

    def __init__(self, names: list[str]) -> None:
        self.tokens = [bytes([value]) for value in range(256)]
        self.tokens += [b"<eos>", b"<any>", *(name.encode() for name in names)]
        self.special_token_ids = list(range(_EOS, len(self.tokens)))
        self.eos_token_id = _EOS
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def matcher_of(grammar: str) -> LLMatcher:
    """A matcher over bytes (ids 0..255) and the special tokens that the grammar names; token 257
    stands for every token that it names by id."""
    plain = _IDS.sub(f"<[{_ANY}]>", grammar)
    names = sorted(set(_NAMES.findall(plain)) - {"<eos>", "<any>"})
    return LLMatcher(LLTokenizer(TokenizerWrapper(Bytes(names)), slices=[]), plain, log_level=0)


def find(grammar: str) -> Finding:
    """Build the grammar and compute its first mask."""
    matcher = matcher_of(grammar)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        is_empty = matcher.is_error() and "NoExtension" in matcher.get_error()
        only_end = sum(map(int.bit_count, mask)) == 1 and mask[_EOS // 8] & 1
        if is_empty or (not matcher.is_error() and only_end and not matcher.is_accepting()):
            return Finding("nothing can match it", ())
    if matcher.is_error():
        return Finding(_shown(matcher.get_error()), ())
    found = [name for text in matcher.get_grammar_warnings() for name in _keywords(text)]
    return Finding("", tuple(dict.fromkeys(found)))


def _shown(error: str) -> str:
    """The first line that says something."""
    if error.startswith("panic"):
        return "it is too large"
    lines = [line.strip() for line in error.split("<state>")[0].splitlines() if line.strip()]
    if lines and lines[0].endswith("regex parse error:"):
        lines = lines[-1:] if len(lines) < 4 else [line for line in lines if "error: " in line]
    return " ".join(lines[:1])[:500] or "it cannot be read"


def _keywords(warning: str) -> list[str]:
    if found := _UNIMPLEMENTED.search(warning):
        return re.findall(r'"([^"]+)"', found[1])
    if found := _NO_FORMAT.search(warning):
        return [f"format {found[1].strip()}"]
    if warning.startswith("oneOf"):
        return ["oneOf"]
    return [] if "no tokenizer" in warning else [warning.split("\n")[0][:80]]


def main() -> None:
    """Answer until stdin ends."""
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    answers.write(bytes(4))  # it is there
    answers.flush()
    while len(head := requests.read(4)) == 4:
        grammar = requests.read(int.from_bytes(head, "big")).decode()
        answer = msgspec.msgpack.encode(find(grammar))
        answers.write(len(answer).to_bytes(4, "big") + answer)
        answers.flush()


if __name__ == "__main__":
    main()
