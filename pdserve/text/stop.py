"""Stop strings over a growing text: emits what is certain and holds back a possible beginning of a
stop string.

All stop strings of a request form one Aho-Corasick automaton (Aho and Corasick, 1975). Its tables
are built once a request and shared by all choices, each of which has one state of its own. A
character costs constant time, however many strings there are, and the result does not depend on how
the text was cut into pieces. The match that *completes* first wins (of several that complete at the
same character the longest), because generation ends there. Knows no tokens. Called by the router
and by `LLM`.
"""

from array import array
from collections.abc import Sequence


class StopStrings:
    """The tables; immutable, about 20 bytes a character. A state stands for a prefix of a stop
    string: the longest that the text read so far ends with. State 0 is the empty one.

    chars: of each state the last character of its prefix. follows: whether that goes on with the
    state before it, as nearly all do. branches: the other ways on from a state, at most one a stop
    string. failures: the state of the next shorter prefix that such a text ends with, too. lengths:
    characters of a state's prefix. matches: length of the longest stop string that is complete
    there (0: none is). firsts: what stop strings begin with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings, may be none. Takes about a microsecond a character."""
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
        self.follows.append(0)  # the last state is followed by none
        self.chars += "\0"
        self.failures = array("I", bytes(self.lengths.itemsize * len(self.lengths)))
        self._link(parents)

    def after(self, state: int, char: str) -> int:
        """The state of a prefix that is longer by `char`; 0 when no stop string goes on so."""
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
        """Fill `failures`, shorter prefixes first, and let each state know the strings that end
        within its prefix."""
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
    """The text of one choice against the stop strings of its request. include: emit the matched
    string too."""

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit, the matched stop string or None). After a match nothing may be pushed."""
        assert not self._matched, "pushed text behind a stop string"
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
        """What was held back, when no text follows."""
        held = self._held
        self._held = ""
        return held

    def _cut(self, text: str, length: int) -> tuple[str, str]:
        self._matched = True
        window = self._held + text
        self._held = ""
        start = len(window) - length
        return window if self._include else window[:start], window[start:]
