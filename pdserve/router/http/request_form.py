"""What every kind of request says about its body: which fields it has, and what it makes of others.

A dialect's requests are structs of this base; `router.http.body_parsing` reads bodies by them, and
the OpenAPI document describes them. Knows no workers and no HTTP framework.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec


class RequestForm(msgspec.Struct, kw_only=True):
    """A request's body. Fields that were not given are None.

    ignored: fields that are asked of a platform, not of a model; they are taken and do nothing.
    neutral: fields that are not supported, with the values that ask for nothing. cures: what to
    do instead of other fields that are not supported. shown_fields: fields that the model is shown;
    long ones are measured against the context before they are decoded. takes_token_ids: `prompt`
    may hold token ids. cuts_prompts: it has `truncate_prompt_tokens`.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    cures: ClassVar[Mapping[str, str]] = {}
    shown_fields: ClassVar[frozenset[str]] = frozenset()
    takes_token_ids: ClassVar[bool] = False
    cuts_prompts: ClassVar[bool] = False
    fits_context: ClassVar[bool] = True


class GeneratingForm(RequestForm, kw_only=True):
    """What every request to generate has."""

    model: str
    stream: bool | None = None

    def forget_input(self) -> None:
        """Let go of what the model was shown, which may be long while the answer takes its
        time."""
