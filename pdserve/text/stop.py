"""Stop strings over a growing text: emits what is certain and holds back a possible beginning of a stop string.

All stop strings of a request form one Aho-Corasick automaton (Aho and Corasick, 1975). Its tables are built once a
request and shared by all choices, each of which has one state of its own. A character costs constant time, however many
strings there are, and the result does not depend on how the text was cut into pieces. The match that *completes* first
wins (of several that complete at the same character the longest), because generation ends there. Knows no tokens.
Called by the router and by `LLM`.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The tables; immutable. A state stands for a prefix of a stop string: the longest that the text read so far ends
    with. State 0 is the empty one.

    following: of each state the state after a character that goes on with a stop string. failures: the state of the
    next shorter prefix that such a text ends with, too. lengths: characters of a state's prefix. matches: length of the
    longest stop string that is complete there (0: none is). firsts: what stop strings begin with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: non-empty strings, may be none. Takes about 1.5 us a character."""
        if not all(stops):
            raise ValueError("stop must be a non-empty string or a list of non-empty strings")
        self.following: list[dict[str, int]] = [{}]
        self.lengths = [0]
        self.matches = [0]
        for stop in stops:
            self._insert(stop)
        self.failures = [0] * len(self.following)
        self._link()
        self.firsts = frozenset(self.following[0])

    def _insert(self, stop: str) -> None:
        state = 0
        for length, char in enumerate(stop, 1):
            after = self.following[state].get(char)
            if after is None:
                after = self.following[state][char] = len(self.following)
                self.following.append({})
                self.lengths.append(length)
                self.matches.append(0)
            state = after
        self.matches[state] = len(stop)

    def _link(self) -> None:
        """Fill `failures`, shorter prefixes first, and let each state know the strings that end within its prefix."""
        following, failures, matches = self.following, self.failures, self.matches
        queue = deque(following[0].values())
        while queue:
            state = queue.popleft()
            for char, after in following[state].items():
                shorter = failures[state]
                while shorter and char not in following[shorter]:
                    shorter = failures[shorter]
                failures[after] = following[shorter].get(char, 0)
                matches[after] = matches[after] or matches[failures[after]]
                queue.append(after)


class StopMatcher:
    """The text of one choice against the stop strings of its request. include: emit the matched string too."""

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit, the matched stop string or None). After a match nothing may be pushed."""
        assert not self._matched, "pushed text behind a stop string"
        stops, state = self._stops, self._state
        if not state and stops.firsts.isdisjoint(text):
            return text, None
        following, failures, matches = stops.following, stops.failures, stops.matches
        for index, char in enumerate(text):
            while (after := following[state].get(char)) is None and state:
                state = failures[state]
            state = after or 0
            if matches[state]:
                return self._cut(text[: index + 1], matches[state])
        self._state = state
        window = self._held + text
        certain = len(window) - stops.lengths[state]
        self._held = window[certain:]
        return window[:certain], None

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, length: int) -> tuple[str, str]:
        self._matched = True
        window = self._held + text
        self._held = ""
        start = len(window) - length
        return window if self._include else window[:start], window[start:]
