"""Log-probabilities of generated tokens in OpenAI's form, for chat completions and Responses.

Knows no request. Called by the responders.
"""

from pdserve.protocol.events import TokenLogprob
from pdserve.router.http.json_pieces import Json, finite
from pdserve.text.tokenizer import Tokenizer


def position_json(tokenizer: Tokenizer, position: TokenLogprob, num_top: int) -> Json:
    """One token with its num_top likeliest alternatives."""
    top = [_entry(tokenizer, token, logprob) for token, logprob in position.top[:num_top]]
    return _entry(tokenizer, position.token_id, position.logprob) | {"top_logprobs": top}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    data = tokenizer.token_bytes(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }
