import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.stop import StopMatcher, StopStrings


def run(
    stops: list[str], text: str, sizes: list[int], include: bool = False
) -> tuple[str, str | None]:
    """Feed the text in pieces of these sizes (repeating the last) until a match or its end."""
    matcher = StopMatcher(StopStrings(stops), include)
    emitted = ""
    at = 0
    for size in [*sizes, *[sizes[-1]] * len(text)]:
        piece, stop = matcher.push(text[at : at + size])
        emitted = emitted + piece
        at = at + size
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


@given(
    st.lists(words, max_size=4),
    st.text("abc", max_size=30),
    st.lists(st.integers(1, 5), min_size=1),
    st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_agrees_with_looking_at_every_prefix(
    stops: list[str], text: str, sizes: list[int], include: bool
) -> None:
    assert run(stops, text, sizes, include) == oracle(stops, text, include)


def test_holds_back_only_a_possible_beginning() -> None:
    matcher = StopMatcher(StopStrings(["</end>"]))
    assert matcher.push("a </e") == ("a ", None)
    assert matcher.push("m") == ("</em", None)
    assert matcher.push("<") == ("", None)
    assert matcher.push("/end>rest") == ("", "</end>")


def test_overlapping_beginnings() -> None:
    assert run(["aab"], "aaab", [1]) == ("a", "aab")
    assert run(["abab"], "ababab", [2]) == ("", "abab")
    assert run(["END", "\n\n"], "x\n\nEND", [1]) == ("x", "\n\n")


def test_flush_gives_the_held_text() -> None:
    matcher = StopMatcher(StopStrings(["stop"]))
    assert matcher.push("xsto") == ("x", None)
    assert (matcher.flush(), matcher.flush()) == ("sto", "")


def test_without_stops_text_passes() -> None:
    assert StopMatcher(StopStrings([])).push("anything") == ("anything", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        StopMatcher(StopStrings([""]))


class OneByOne:
    """Stop strings by looking at each of them after each character, as `StopMatcher` but slow."""

    def __init__(self, stops: list[str], include: bool) -> None:
        self.stops = stops
        self.include = include
        self.read = ""
        self.shown = 0

    def push(self, text: str) -> tuple[str, str | None]:
        for char in text:
            self.read += char
            ended = [stop for stop in self.stops if self.read.endswith(stop)]
            if ended:
                stop = max(ended, key=len)
                return self.read[
                    self.shown : len(self.read) - (0 if self.include else len(stop))
                ], stop
        begun = [
            n for stop in self.stops for n in range(1, len(stop)) if self.read.endswith(stop[:n])
        ]
        start = self.shown
        self.shown = len(self.read) - max(begun, default=0)
        return self.read[start : self.shown], None


@given(st.lists(words, max_size=6), st.lists(st.text("abc", max_size=6), max_size=8), st.booleans())
@settings(max_examples=500, deadline=None)
def test_every_piece_is_what_looking_at_each_string_gives(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    ours = StopMatcher(StopStrings(stops), include)
    slow = OneByOne(stops, include)
    for piece in pieces:
        emitted, stop = ours.push(piece)
        assert (emitted, stop) == slow.push(piece)
        if stop is not None:
            break


def test_choices_share_the_tables_and_nothing_else() -> None:
    stops = StopStrings(["aab", "ab"])
    first = StopMatcher(stops)
    second = StopMatcher(stops)
    assert (first.push("aa"), second.push("xa")) == (("", None), ("x", None))
    assert (first.push("b"), second.push("c")) == (("", "aab"), ("ac", None))


def test_a_character_costs_the_same_however_many_strings_there_are() -> None:
    """Counted, not timed: how often the tables are looked into."""

    class Counted(StopStrings):
        looked_up = 0

        def after(self, state: int, char: str) -> int:
            self.looked_up += 1
            return super().after(state, char)

    text = "ab" * 500
    counts = []
    for num_stops in (1, 64):
        stops = Counted([f"{'ab' * 60}{chr(200 + i)}" for i in range(num_stops)])
        stops.looked_up = 0
        StopMatcher(stops).push(text)
        counts.append(stops.looked_up)
    assert counts[0] == counts[1] <= 2 * len(text)


def test_the_tables_are_small() -> None:
    """A small body must not become a large thing in memory, nor thousands of objects to look
    through for garbage."""
    strings = [f"{i:028}" + chr(97 + i % 26) * 100 for i in range(64)]
    tracemalloc.start()
    try:
        stops = StopStrings(strings)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 25 * sum(map(len, strings))
    assert len(stops.branches) < 64
