"""The body of /v1/embeddings: OpenAI's fields, and vLLM's.

Knows no workers and no HTTP framework. Used by `router.http.embeddings.dialect`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pdserve.router.errors import ApiError
from pdserve.router.http.request_form import AnsweredForm, prompts_of
from pdserve.router.request.prompts import Prompt
from pdserve.router.request.request_checks import Names

NAMES = Names(prompt="input")


class EmbeddingRequest(AnsweredForm, kw_only=True):
    """A request for embeddings.

    `input` is a text, token ids, or a list of either. `encoding_format` "float" (the default)
    writes numbers, and "base64" writes little-endian float32. `dimensions` is the length to which
    embeddings are cut. `normalize` makes their length 1; the model has the default.
    `truncate_prompt_tokens` cuts each input to its first tokens; -1 leaves as many as fit.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})
    cures: ClassVar[Mapping[str, str]] = {
        "messages": "render the conversation yourself and send its text as input",
        "prompt": "send input",
        "request_id": "send it in the header x-request-id",
        "stream": "embeddings come at once",
    }
    prompt_field: ClassVar[str] = "input"
    cuts_prompts: ClassVar[bool] = True

    input: str | list[int | str | tuple[int, ...]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def forget_input(self) -> None:
        self.input = ""

    def prompts(self) -> Sequence[Prompt]:
        """Returns the inputs. Raises ApiError (400) if there are none, or if one is empty."""
        found = prompts_of(self.input, "input")
        for number, prompt in enumerate(found):
            if not len(prompt):
                which = "input" if isinstance(self.input, str) else f"input[{number}]"
                raise ApiError(
                    f"{which} is empty: leave it out, or send a text of at least one token",
                    param="input",
                )
        return found
