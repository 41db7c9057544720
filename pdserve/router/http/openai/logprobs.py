"""Writes log-probabilities of generated tokens in OpenAI's form, for chat completions and
Responses.

Knows no request. Called by the responders.
"""

from pdserve.protocol.events import TokenLogprob
from pdserve.router.http.json_pieces import Json, finite
from pdserve.text.tokenizer import Tokenizer


def position_json(
    tokenizer: Tokenizer, position: TokenLogprob, num_top: int, names_ids: bool = False
) -> Json:
    """Describes one token with its `num_top` likeliest alternatives.

    With `names_ids` tokens are named by their ids; `bytes` are still those of their texts.
    """
    top = [
        _entry(tokenizer, token, logprob, names_ids) for token, logprob in position.top[:num_top]
    ]
    own = _entry(tokenizer, position.token_id, position.logprob, names_ids)
    return own | {"top_logprobs": top}


def token_id_name(token: int) -> str:
    """Returns vLLM's name of a token by its id."""
    return f"token_id:{token}"


def _entry(tokenizer: Tokenizer, token: int, logprob: float, names_ids: bool) -> Json:
    data = tokenizer.token_bytes(token)
    return {
        "token": token_id_name(token) if names_ids else data.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }
