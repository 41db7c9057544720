"""Stop strings over a growing text: emits what is certain and holds back a possible beginning of a stop string.

Each stop string is a Knuth-Morris-Pratt automaton, so a character costs constant time and the result does not depend on
how the text was cut into pieces. The match that *completes* first wins (of several that complete at the same character
the longest), because generation ends there. Knows no tokens. One object a choice; called by the router and by `LLM`.
"""

from collections.abc import Sequence


class StopMatcher:
    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """stops: non-empty strings, may be none. include: emit the matched string too."""
        if not all(stops):
            raise ValueError("stop must be a non-empty string or a list of non-empty strings")
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit, the matched stop string or None). After a match nothing may be pushed."""
        assert not self._matched, "pushed text behind a stop string"
        if not self._automata:
            return text, None
        for index, char in enumerate(text):
            stop = self._advance(char)
            if stop is not None:
                return self._cut(text[: index + 1], stop), stop
        window = self._held + text
        certain = len(window) - max(automaton.state for automaton in self._automata)
        self._held = window[certain:]
        return window[:certain], None

    def flush(self) -> str:
        """What was held back, when no text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        matched = None
        for automaton in self._automata:
            if automaton.advance(char) and matched is None:
                matched = automaton.pattern
        return matched

    def _cut(self, text: str, stop: str) -> str:
        self._matched = True
        window = self._held + text
        self._held = ""
        return window if self._include else window[: len(window) - len(stop)]


class _Automaton:
    """state: length of the longest prefix of the pattern that the text read so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        self._failure = [0] * len(pattern)
        for index in range(1, len(pattern)):
            self._failure[index] = self._next(self._failure[index - 1], pattern[index])

    def advance(self, char: str) -> bool:
        """True when the pattern is complete."""
        self.state = self._next(self.state, char)
        return self.state == len(self.pattern)

    def _next(self, state: int, char: str) -> int:
        while state and self.pattern[state] != char:
            state = self._failure[state - 1]
        return state + 1 if self.pattern[state] == char else 0
