"""The work of computing a part of a prompt, in tokens.

A token costs its row of every matrix product, and attention to all tokens before it. Deep in a long
prompt attention is a third of the time. So queues, speeds and forecasts count a prompt's work: its
tokens, and for each pair of a token and one that it attends to `pair_tokens` more, which a worker
has measured. Without attention the work is the number of tokens. Knows no engine.
"""


def attended_by(num_tokens: float, start: float) -> float:
    """Number of pairs of a token, of num_tokens from position `start` on, and one it attends to."""
    return num_tokens * (start + num_tokens / 2)


def prompt_work(num_tokens: float, start: float, pair_tokens: float) -> float:
    """Work of num_tokens tokens of a prompt after its first `start`, in tokens."""
    return num_tokens + pair_tokens * attended_by(num_tokens, start)
