"""Waiting in tests until a condition comes true. A failure says what was awaited, and what its
parts were at last.

`until` is for threads and for loops that a test turns by hand, `until_async` for asyncio; `stays`
watches that nothing changes. Both look at the condition itself for the message: `until(lambda:
len(got) == 2)` fails with "len(got) == 2" and "got = [7]".
"""

import ast
import asyncio
import inspect
import linecache
import time
from collections.abc import Callable
from functools import partial
from typing import Any

Condition = Callable[[], object]

SHOWN = 600  # characters of one value
# Of calls of these the arguments tell more than the result.
TRANSPARENT = {"any", "all", "len", "sum", "bool", "sorted", "set", "list", "next", "isinstance"}


def until(
    condition: Condition,
    seconds: float = 60.0,
    doing: Callable[[], object] = lambda: None,
    pause_s: float = 0.001,
) -> None:
    """Return once the condition holds; `doing` is called between two looks at it. AssertionError
    after so many seconds.
    """
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, complaint(condition, seconds)
        doing()
        time.sleep(pause_s)


async def until_async(condition: Condition, seconds: float = 60.0, pause_s: float = 0.002) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, complaint(condition, seconds)
        await asyncio.sleep(pause_s)


def stays(condition: Condition, seconds: float, pause_s: float = 0.005) -> None:
    """Look for so long whether something happens that must not: no condition tells that it never
    will. AssertionError once the condition does not hold."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        assert condition(), complaint(condition, seconds, "did not stay true for")
        time.sleep(pause_s)


async def stays_async(condition: Condition, seconds: float, pause_s: float = 0.005) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        assert condition(), complaint(condition, seconds, "did not stay true for")
        await asyncio.sleep(pause_s)


def complaint(
    condition: Condition, seconds: float, failed: str = "did not come true within"
) -> str:
    """Says what was awaited, and the last values of its parts."""
    text = _source(condition)
    lines = [f"{failed} {seconds:g} s: {text}"]
    lines += [f"    {name} = {value}" for name, value in _parts(condition, text).items()]
    return "\n".join(lines)


def _source(condition: Condition) -> str:
    """The expression of a lambda; the name and arguments of anything else."""
    if isinstance(condition, partial):
        return f"{condition.func.__name__}{condition.args!r:.{SHOWN}}"
    if getattr(condition, "__name__", "") != "<lambda>":
        return getattr(condition, "__qualname__", repr(condition))
    code = condition.__code__
    spans = [
        (first, begin, last, end)
        for first, last, begin, end in code.co_positions()
        if first is not None and last is not None and begin is not None and end
    ]
    first, begin = min((span[0], span[1]) for span in spans)
    last, end = max((span[2], span[3]) for span in spans)
    lines = [
        linecache.getline(code.co_filename, number).encode() for number in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join(line.decode().strip() for line in lines)


def _parts(condition: Condition, text: str) -> dict[str, str]:
    """The variables of a function; of a lambda what it compares and calls."""
    if not inspect.isfunction(condition):
        return {}
    inner = dict(inspect.getclosurevars(condition).nonlocals)
    inner |= {
        name: parameter.default
        for name, parameter in inspect.signature(condition).parameters.items()
        if parameter.default is not parameter.empty
    }
    if condition.__name__ != "<lambda>":
        return {name: _shown(value) for name, value in inner.items()}
    try:
        tree = ast.parse(f"({text})", mode="eval")
    except SyntaxError:
        return {name: _shown(value) for name, value in inner.items()}
    names = {**condition.__globals__, **inner}
    return {ast.unparse(leaf): _value(leaf, names) for leaf in _leaves(tree.body)}


def _leaves(node: ast.expr) -> list[ast.expr]:
    match node:
        case ast.BoolOp():
            inside = node.values
        case ast.Compare():
            inside = [node.left, *node.comparators]
        case ast.UnaryOp(op=ast.Not()):
            inside = [node.operand]
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
            inside = [node.generators[0].iter]
        case ast.Call(func=ast.Name(id=name)) if name in TRANSPARENT and node.args:
            inside = [node.args[0]]
        case ast.Constant():
            return []
        case _:
            return [node]
    return [leaf for each in inside for leaf in _leaves(each)]


def _value(node: ast.expr, names: dict[str, Any]) -> str:
    try:
        return _shown(eval(compile(ast.Expression(node), "<awaited>", "eval"), names))
    except Exception as error:  # the message must come, whatever the condition is made of
        return f"({type(error).__name__}: {error})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
