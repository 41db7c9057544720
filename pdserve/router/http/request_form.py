"""What every kind of request says about its body: which fields it has, and what it makes of others.

A dialect's requests are structs of this base; `router.http.body_parsing` reads bodies by them, and
the OpenAPI document describes them. Knows no workers and no HTTP framework.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import msgspec

from pdserve.router.errors import ApiError
from pdserve.router.request.prompts import Prompt, SharedIds


class RequestForm(msgspec.Struct, kw_only=True):
    """A request's body. Fields that were not given are None.

    ignored: fields that are asked of a platform, not of a model; they are taken and do nothing.
    neutral: fields that are not supported, with the values that ask for nothing. cures: what to
    do instead of other fields that are not supported. shown_fields: fields that the model is shown;
    long ones are measured against the context before they are decoded. prompt_field: the field that
    holds a text, token ids, or many of either; "" without one. cuts_prompts: it has
    `truncate_prompt_tokens`.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    cures: ClassVar[Mapping[str, str]] = {}
    shown_fields: ClassVar[frozenset[str]] = frozenset()
    prompt_field: ClassVar[str] = ""
    cuts_prompts: ClassVar[bool] = False
    fits_context: ClassVar[bool] = True


class AnsweredForm(RequestForm, kw_only=True):
    """What every request has that workers compute something for."""

    model: str

    @property
    def streams(self) -> bool:
        """Whether the answer is to come in events."""
        return False

    def forget_input(self) -> None:
        """Let go of what the model was shown, which may be long while the answer takes its
        time."""


class GeneratingForm(AnsweredForm, kw_only=True):
    """What every request to generate has."""

    stream: bool | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)


def prompts_of(given: str | list[int | str | tuple[int, ...]], named: str) -> Sequence[Prompt]:
    """One or many prompts as a list of texts or of token ids. named: the field. Raises ApiError
    (400) when there is none, or kinds are mixed."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast(list[int], given)]
    if kinds in ({str}, {tuple}, {SharedIds}):
        return cast(list[Prompt], given)
    what = "is an empty list" if not kinds else "mixes texts and token ids"
    raise ApiError(
        f"{named} {what}: send a text, a list of texts, a list of token ids or a list of these",
        param=named,
    )
