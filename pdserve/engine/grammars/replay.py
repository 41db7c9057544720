"""Takes a grammar through tokens that a choice already has."""

from collections.abc import Collection, Sequence

from pdserve.engine.grammars.grammar import Grammar


def replay(grammar: Grammar, tokens: Sequence[int], endings: Collection[int]) -> int | None:
    """Advance the grammar by the tokens. Tokens in `endings` may come where it accepts. Returns the
    index of the first token that it does not allow; None if it allows all."""
    is_over = False
    for place, token in enumerate(tokens):
        if is_over:
            if token not in endings:
                return place
        elif not grammar.advance(token):
            if token not in endings or not grammar.is_accepting():
                return place
            is_over = True
    return None
