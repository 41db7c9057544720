"""Stop strings over a growing text: emits what is certain and holds back a possible beginning of a
stop string.

All stop strings of a request form one Aho-Corasick automaton (Aho and Corasick, 1975). Its tables
are built once per request and shared by all choices. Each choice has one state of its own. A
character costs constant time, however many strings there are, and the result does not depend on how
the text was cut into pieces. The match that *completes* first wins, because generation ends there.
If several complete at the same character, the longest wins. This module knows no tokens. The router
and `LLM` call it.
"""

from array import array
from collections.abc import Sequence


class StopStrings:
    """The tables of the automaton. They are immutable and take about 20 bytes per character.

    A state stands for the longest prefix of a stop string that ends the text read so far. State 0
    is the empty prefix. By state:

    - chars: Last character of the state's prefix.
    - follows: 1 if state - 1 is the prefix without its last character, as for nearly all states.
    - branches: Other transitions of the state, by character. There is at most one per stop string.
    - failures: State of the next shorter prefix that ends the same text.
    - lengths: Number of characters of the state's prefix.
    - matches: Length of the longest stop string that is complete there. 0: none is.

    - firsts: First characters of all stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Builds the tables in about a microsecond per character. `stops` are non-empty strings,
        and there may be none of them."""
        if not all(stops):
            raise ValueError("stop must be a non-empty string or a list of non-empty strings")
        self.firsts = frozenset(stop[0] for stop in stops)
        self.follows = bytearray(b"\0")
        self.branches: dict[int, dict[str, int]] = {}
        self.lengths = array("I", [0])
        self.matches = array("I", [0])
        self.chars = "\0"
        parents = array("I", [0])
        for stop in stops:
            self._insert(stop, parents)
        self.follows.append(0)  # no state follows the last one
        self.chars += "\0"
        self.failures = array("I", bytes(self.lengths.itemsize * len(self.lengths)))
        self._link(parents)

    def after(self, state: int, char: str) -> int:
        """Returns the state of the prefix that is longer by `char`, or 0 if no stop string goes on
        with `char`."""
        following = state + 1
        if self.follows[following] and self.chars[following] == char:
            return following
        branches = self.branches.get(state)
        return 0 if branches is None else branches.get(char, 0)

    def _insert(self, stop: str, parents: "array[int]") -> None:
        state = 0
        known = 0
        while known < len(stop) and (after := self._known_after(state, stop[known])):
            state = after
            known = known + 1
        for length in range(known + 1, len(stop) + 1):
            new = len(self.lengths)
            if new != state + 1:
                self.branches.setdefault(state, {})[stop[length - 1]] = new
            self.follows.append(new == state + 1)
            self.lengths.append(length)
            self.matches.append(0)
            parents.append(state)
            state = new
        self.chars += stop[known:]
        self.matches[state] = len(stop)

    def _known_after(self, state: int, char: str) -> int:
        return self.after(state, char) if state + 1 < len(self.lengths) else 0

    def _link(self, parents: "array[int]") -> None:
        """Fills `failures`, shorter prefixes first. Also extends `matches` to stop strings that end
        a state's prefix without being it."""
        failures = self.failures
        matches = self.matches
        for state in sorted(range(1, len(parents)), key=self.lengths.__getitem__):
            if parents[state] == 0:
                continue
            char = self.chars[state]
            shorter = failures[parents[state]]
            while not (after := self.after(shorter, char)) and shorter:
                shorter = failures[shorter]
            failures[state] = after
            matches[state] = matches[state] or matches[after]


class StopMatcher:
    """Matches the text of one choice against the stop strings of its request. With `include`, the
    matched string is emitted, too."""

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text to emit, and the matched stop string or None. Nothing may be pushed
        after a match."""
        assert not self._matched, "pushed text after a stop string"
        stops = self._stops
        state = self._state
        if not state and stops.firsts.isdisjoint(text):
            return text, None
        for index, char in enumerate(text):
            while not (after := stops.after(state, char)) and state:
                state = stops.failures[state]
            state = after
            if stops.matches[state]:
                return self._cut(text[: index + 1], stops.matches[state])
        self._state = state
        window = self._held + text
        certain = len(window) - stops.lengths[state]
        self._held = window[certain:]
        return window[:certain], None

    def flush(self) -> str:
        """Returns the held text when no text follows."""
        held = self._held
        self._held = ""
        return held

    def _cut(self, text: str, length: int) -> tuple[str, str]:
        self._matched = True
        window = self._held + text
        self._held = ""
        start = len(window) - length
        return window if self._include else window[:start], window[start:]
