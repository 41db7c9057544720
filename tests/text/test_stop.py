import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.stop import StopMatcher


def run(stops: list[str], text: str, sizes: list[int], include: bool = False) -> tuple[str, str | None]:
    """Feed the text in pieces of these sizes (repeating the last) until a match or its end."""
    matcher, emitted, at = StopMatcher(stops, include), "", 0
    for size in [*sizes, *[sizes[-1]] * len(text)]:
        piece, stop = matcher.push(text[at : at + size])
        emitted, at = emitted + piece, at + size
        if stop is not None:
            return emitted, stop
    return emitted + matcher.flush(), None


def oracle(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


words = st.text("ab", min_size=1, max_size=5)


@given(st.lists(words, max_size=4), st.text("abc", max_size=30), st.lists(st.integers(1, 5), min_size=1), st.booleans())
@settings(max_examples=500, deadline=None)
def test_agrees_with_looking_at_every_prefix(stops: list[str], text: str, sizes: list[int], include: bool) -> None:
    assert run(stops, text, sizes, include) == oracle(stops, text, include)


def test_holds_back_only_a_possible_beginning() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("a </e") == ("a ", None)
    assert matcher.push("m") == ("</em", None)
    assert matcher.push("<") == ("", None)
    assert matcher.push("/end>rest") == ("", "</end>")


def test_overlapping_beginnings() -> None:
    assert run(["aab"], "aaab", [1]) == ("a", "aab")
    assert run(["abab"], "ababab", [2]) == ("", "abab")
    assert run(["END", "\n\n"], "x\n\nEND", [1]) == ("x", "\n\n")


def test_flush_gives_the_held_text() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("xsto") == ("x", None)
    assert (matcher.flush(), matcher.flush()) == ("sto", "")


def test_without_stops_text_passes() -> None:
    assert StopMatcher([]).push("anything") == ("anything", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        StopMatcher([""])
