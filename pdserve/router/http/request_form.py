"""The base of all requests' bodies: which fields a request has, and what it makes of other fields.

Each dialect's requests are structs of this base. `router.http.body_parsing` reads bodies by them,
and the OpenAPI document describes them. Knows no workers and no HTTP framework.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import msgspec

from pdserve.router.errors import ApiError
from pdserve.router.request.prompts import Prompt, SharedIds


class RequestForm(msgspec.Struct, kw_only=True):
    """A request's body. Fields that were not given are None."""

    # Fields that are meant for a platform, not for a model; they are accepted and do nothing.
    ignored: ClassVar[frozenset[str]] = frozenset()
    # Fields that are not supported, with the values that ask for nothing.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # What to do instead of other fields that are not supported.
    cures: ClassVar[Mapping[str, str]] = {}
    # Fields that the model is shown; long ones are measured against the context before decoding.
    shown_fields: ClassVar[frozenset[str]] = frozenset()
    # The field that holds a text, token ids, or many of either; "" if there is none.
    prompt_field: ClassVar[str] = ""
    # True if it has `truncate_prompt_tokens`.
    cuts_prompts: ClassVar[bool] = False
    # True if the shown fields must fit the model's context.
    fits_context: ClassVar[bool] = True


class AnsweredForm(RequestForm, kw_only=True):
    """The base of all requests that workers compute something for."""

    model: str

    @property
    def streams(self) -> bool:
        """True if the answer should come in events."""
        return False

    def forget_input(self) -> None:
        """Frees what the model was shown, which may be long, while the answer takes its time."""


class GeneratingForm(AnsweredForm, kw_only=True):
    """The base of all requests to generate."""

    stream: bool | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)


def prompts_of(given: str | list[int | str | tuple[int, ...]], named: str) -> Sequence[Prompt]:
    """Returns one or many prompts as a list of texts or of token ids; `named` is the field.

    Raises ApiError (400) if there is none, or if kinds are mixed.
    """
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
