"""A process of its own that makes and builds grammars, and reports whether they can be used.

With a hostile grammar, llguidance may take seconds, or overflow the stack, which ends the process.
Here that harms nobody else, and it holds no other process's interpreter lock.

    main --FORK and a socket, over stdin--> a fork answers the frames that come over that socket

Both say READY first. The next FORK ends the fork before, whatever it does, and so does the end of
stdin. A question is 4 bytes of length, 4 bytes of CPU time in ms (0: any), and JSON. A fork that
needs more CPU time ends. An answer is 4 bytes of length and JSON. A thread with a small stack
builds the grammars, so a grammar that passes here fits the stack of any engine. `process` runs this
module as `python -m pdserve.text.grammars.probe`.
"""

import os
import re
import signal
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO, NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pdserve.text.grammars.grammar_of import grammar_of, unenforced_names, whitespace_besides
from pdserve.text.grammars.json_schemas.property_counts import KEYWORDS as PROPERTY_COUNTS
from pdserve.text.grammars.lark import remarked
from pdserve.text.grammars.reasoning import (
    MAX_SPACE,
    NO_REASONING,
    ReasoningPrefix,
    after_reasoning,
)
from pdserve.text.grammars.structured import StructuredRequest

STACK_BYTES = 1 << 22  # half of a thread's default
FORK = b"f"
READY = b"r"
NOTHING_FITS = "nothing can match it"
_EOS = 256
_ANY = 257  # stands for every token that a grammar names by its id
_NAMES = re.compile(r"<[^<>\[\]\s\"'\\]{1,128}>")
_IDS = re.compile(r"<\[[0-9,\- ^]+\]>")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_NO_FORMAT = re.compile(r"Unknown format: (.*)")


# parts of a grammar: for each its field, which begins its errors, and a grammar of it alone
Parts = tuple[tuple[str, str], ...]


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Asks whether an existing grammar can be used. `field` is its name in errors, unless one of
    its `parts` is at fault."""

    grammar: str
    field: str
    parts: Parts = ()


class Make(msgspec.Struct, frozen=True, tag="make"):
    """Asks to make a grammar, and whether it can be used.

    - structured: The form that the request asks for.
    - prefix: Reasoning that may, or must, stand before the form.
    - call_rules: Rules of calls that are allowed instead of the form.
    - parts: Parts of these rules.
    """

    structured: StructuredRequest
    prefix: ReasoningPrefix = NO_REASONING
    call_rules: tuple[str, ...] = ()
    parts: Parts = ()


Question = Check | Make


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a question.

    - error: Why the grammar cannot be used, beginning with the field. "": it can be used.
    - text: The grammar.
    - unenforced: Keywords of JSON schemas that the grammar leaves out. For `format`, the name of
      the format is added.
    """

    error: str
    text: str = ""
    unenforced: tuple[str, ...] = ()


class Bytes:
    """A tokenizer of bytes and of the special tokens that a grammar names, in the form that
    llguidance needs."""

    def __init__(self, names: list[str]) -> None:
        self.tokens = [bytes([value]) for value in range(256)]
        self.tokens += [b"<eos>", b"<any>", *(name.encode() for name in names)]
        self.special_token_ids = list(range(_EOS, len(self.tokens)))
        self.eos_token_id = _EOS
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def matcher_of(grammar: str) -> LLMatcher:
    """Returns a matcher over bytes (ids 0..255) and the special tokens that the grammar names.
    Token 257 stands for every token that it names by id."""
    plain = _IDS.sub(f"<[{_ANY}]>", grammar)
    names = sorted(set(_NAMES.findall(plain)) - {"<eos>", "<any>"})
    return LLMatcher(LLTokenizer(TokenizerWrapper(Bytes(names)), slices=[]), plain, log_level=0)


def answer(question: Question) -> Finding:
    """Makes the grammar if needed, and builds it."""
    if isinstance(question, Check):
        return _blamed(_built(question.grammar, question.field), question.parts)
    asked = question.structured
    try:
        form = grammar_of(asked, question.prefix.opening)
        names = unenforced_names(asked)
    except ValueError as error:
        return Finding(str(error))
    if wrong := _whitespace_error(asked):
        return Finding(wrong)
    before = _tokens_before(question.prefix)
    found = _built(after_reasoning(form, question.prefix), asked.field, before)
    # The form was built alone first: beside calls, a form that nothing matches would go unnoticed.
    if question.call_rules and not found.error:
        text = after_reasoning(form, question.prefix, question.call_rules)
        found = _blamed(_built(text, "tools", before), question.parts)
    unenforced = tuple(sorted(names.union(found.unenforced)))
    return Finding(found.error, found.text, unenforced)


def _blamed(found: Finding, parts: Parts) -> Finding:
    """Returns the finding, or if it is an error, that of the part that is at fault."""
    alone = (_built(grammar, field) for field, grammar in (parts if found.error else ()))
    return next((part for part in alone if part.error), found)


def _whitespace_error(asked: StructuredRequest) -> str:
    """Returns what is wrong with the whitespace pattern; "" if nothing is."""
    other = whitespace_besides(asked)
    if not other:
        return ""
    found = _built(other, f"{asked.field}: its whitespace pattern")
    if not found.error:
        return (
            f"{asked.field}: its whitespace pattern allows more than JSON's whitespace: use only "
            "spaces, \\t, \\n and \\r in it"
        )
    return "" if NOTHING_FITS in found.error else found.error


def _tokens_before(prefix: ReasoningPrefix) -> list[int]:
    """Returns the shortest reasoning with all the whitespace that may follow it, in tokens of
    `matcher_of`. Without reasoning it is []."""
    tokens: list[int] = []
    for text in prefix.shortest:
        tokens += [_ANY] if text in prefix.token_ids else text.encode()
    return tokens + list(b"\n" * MAX_SPACE) if tokens else []


def _built(grammar: str, field: str, before: Sequence[int] = ()) -> Finding:
    """Builds the grammar, and computes the first mask after the tokens in `before`. That mask shows
    if nothing can match."""
    matcher = matcher_of(grammar)
    error = ""
    if before and not matcher.is_error():
        matcher.consume_tokens(list(before))
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        is_stuck = matcher.is_error() and "NoExtension" in matcher.get_error()
        is_end = sum(map(int.bit_count, mask)) == 1 and mask[_EOS // 8] & 1
        if is_stuck or (not matcher.is_error() and is_end and not matcher.is_accepting()):
            error = NOTHING_FITS
    if matcher.is_error() and not error:
        error = _shown(matcher.get_error())
    if error:
        return Finding(cannot_be_used(field, error))
    warnings = matcher.get_grammar_warnings()
    found = [name for text in warnings for name in _keywords(text, grammar)]
    return Finding("", grammar, tuple(sorted({*found, *remarked(grammar)})))


def cannot_be_used(field: str, why: str) -> str:
    """Returns the message of an error."""
    return f"{field} cannot be used as a grammar: {why.rstrip('.')}; mend or simplify it"


def _shown(error: str) -> str:
    """Returns the first line of the error that has a meaning for users."""
    if error.startswith("panic"):
        return "it is too large"
    if "greater than number of properties" in error:
        return (
            "minProperties asks for more properties than can be counted where allOf, anyOf or $ref "
            "join schemas; name that many in required"
        )
    if error.startswith("Failed to generate regex for"):
        return "it has a minimum or maximum of 10**18 or more; send one nearer to 0"
    lines = [line.strip() for line in error.split("<state>")[0].splitlines() if line.strip()]
    if lines and lines[0].endswith("regex parse error:"):
        lines = lines[-1:] if len(lines) < 4 else [line for line in lines if "error: " in line]
    return " ".join(lines[:1])[:500] or "it cannot be read"


def _keywords(warning: str, grammar: str) -> list[str]:
    """Returns the keywords that a warning is about."""
    if found := _UNIMPLEMENTED.search(warning):
        return re.findall(r'"([^"]+)"', found[1])
    if found := _NO_FORMAT.search(warning):
        return [f"format {found[1].strip()}"]
    if warning.startswith("oneOf"):
        return ["oneOf"]
    if warning.startswith("min/maxProperties"):
        return [name for name in PROPERTY_COUNTS if f'"{name}"' in grammar]
    return [] if "no tokenizer" in warning else [warning.split("\n")[0][:80]]


def main() -> None:
    """Forks one that answers questions, each time that it is asked to, until stdin ends."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        print("This process can be started. Nothing asks it here, so it ends.")
        return
    os.nice(int(sys.argv[1]))
    child = 0
    with socket.socket(fileno=0) as control:
        control.sendall(READY)
        while True:
            word, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if child:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if word != FORK:
                return
            child = os.fork()
            if not child:
                control.close()
                _answer_on(sockets[0])
            os.close(sockets[0])


def _answer_on(number: int) -> NoReturn:
    """Answers questions that come over the socket of this number, and ends the process."""
    threading.stack_size(STACK_BYTES)
    with socket.socket(fileno=number) as questions, questions.makefile("rwb") as stream:
        questions.sendall(READY)
        thread = threading.Thread(target=_serve, args=(stream,))
        thread.start()
        thread.join()
    os._exit(0)


def _serve(stream: BinaryIO) -> None:
    decoder = msgspec.json.Decoder(Question)
    while len(head := stream.read(8)) == 8:
        question = decoder.decode(stream.read(int.from_bytes(head[:4], "big")))
        # SIGPROF ends a process that does not handle it
        signal.setitimer(signal.ITIMER_PROF, int.from_bytes(head[4:], "big") / 1000)
        data = msgspec.json.encode(answer(question))
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(len(data).to_bytes(4, "big") + data)
        stream.flush()


if __name__ == "__main__":
    main()
