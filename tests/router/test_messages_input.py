"""Arguments of calls as the input of tool_use blocks: an object, whatever the model wrote and
however it was cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.http.messages.tool_input import INVALID_JSON, ToolInput

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text('a"\\{}[],:é🙂\n ', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('ab"\\{,', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text('ab"\\{,', max_size=3), VALUES, max_size=4)


def passed(text: str, cuts: list[int]) -> list[str]:
    """Returns what a ToolInput lets through of a text in pieces, and last what it adds."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    found = ToolInput()
    shown = [found.push(text[a:b]) for a, b in pairwise(places)]
    return [*shown, found.finish(text)]


@settings(max_examples=300, deadline=None)
@given(OBJECTS, st.sampled_from([None, 1]), st.booleans(), st.lists(st.integers(0, 999)))
def test_an_object_passes_as_it_was_written(
    value: dict[str, Any], indent: int | None, is_ascii: bool, cuts: list[int]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert "".join(passed(f" \n{text}\n", cuts)) == text


@settings(max_examples=300, deadline=None)
@given(st.text('{}[]":,\\a1 \n', max_size=30), st.lists(st.integers(0, 99)))
def test_whatever_was_written_is_an_object_and_nothing_is_lost(text: str, cuts: list[int]) -> None:
    shown = "".join(passed(text, cuts))
    assert shown == "".join(passed(text, [])), "cuts do not matter"
    found = json.loads(shown)
    assert isinstance(found, dict)
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if is_object:
        assert found == json.loads(text) and INVALID_JSON not in found
    else:
        assert found[INVALID_JSON] == text


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"a": 1, "b": "x, y", "c": [1', {"a": 1, "b": "x, y"}),
        ('{"a": {"b": 1}, "c', {"a": {"b": 1}}),
        ('{"a": 1, b: 2, "c": 3}', {"a": 1}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": 1} and', {"a": 1}),
        ('{"a": 1}{"b": 2}', {"a": 1}),
        ('{"a": [1}, "b": 2]}', {}),
        ("[1, 2]", {}),
        ("{]", {}),
        ('{"a": 1]', {"a": 1}),
        ('"{}"', {}),
        ("}{", {}),
        ("{'a': 1}", {}),
        ("", {}),
    ],
)
def test_what_is_no_object_keeps_its_whole_members(text: str, want: dict[str, Any]) -> None:
    for cuts in ([], list(range(len(text)))):
        assert json.loads("".join(passed(text, cuts))) == want | {INVALID_JSON: text}


def test_a_member_passes_as_soon_as_it_is_whole() -> None:
    found = ToolInput()
    pieces = ['{"a', '": "x, ', 'y"', ', "b": {"c": 1', "}}"]
    assert [found.push(piece) for piece in pieces] == [
        "",
        "",
        "",
        '{"a": "x, y"',
        ', "b": {"c": 1}',
    ]
    assert found.finish("".join(pieces)) == "}"


def test_deep_nesting_is_no_error() -> None:
    text = '{"a": ' + "[" * 100_000
    assert json.loads("".join(passed(text, []))) == {INVALID_JSON: text}
    closed = text + "]" * 100_000 + "}"
    assert INVALID_JSON in json.loads("".join(passed(closed, [])))


def test_time_is_linear_however_arguments_are_cut() -> None:
    text = json.dumps({"a": "x" * 200_000, "b": 2})
    found = ToolInput()
    shown = [found.push(char) for char in text]
    assert sum(map(bool, shown)) == 2 and "".join(shown) + found.finish(text) == text
