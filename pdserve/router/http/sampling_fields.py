"""The sampling fields of every dialect's requests (vLLM's parameters by their names), and the
SamplingParams made from them.

Knows no workers and no HTTP framework. The base of the requests in `router.http.openai` and
`router.http.responses`; `router.http.messages` uses the functions.
"""

from collections.abc import Mapping
from typing import Any

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import INVALID_GRAMMAR, ApiError, grammar_error, value_error
from pdserve.router.http.request_form import GeneratingForm, RequestForm
from pdserve.text.grammars.structured import FIELDS, StructuredRequest, structured_of


class SamplingFields(GeneratingForm, kw_only=True):
    """Fields of vLLM's sampling parameters; None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logit_rules: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def asked_form(self) -> StructuredRequest | None:
        """Returns the form that the fields ask for; None: any text.

        Raises ValueError, which begins with the field.
        """
        return structured_of({name: getattr(self, name, None) for name in FIELDS})

    def structured(self) -> StructuredRequest | None:
        """Returns the form that the answer must have; None: any text.

        Raises ApiError naming the parameter.
        """
        try:
            found = self.asked_form()
        except ValueError as error:
            raise grammar_error(error) from error
        return checked_form(found, self.logit_rules, self.ignore_eos)


def checked_form(
    found: StructuredRequest | None, logit_rules: Mapping[str, Any] | None, ignore_eos: bool | None
) -> StructuredRequest | None:
    """Returns the same form. Raises ApiError if other fields of the request contradict it."""
    if found is None:
        return None
    if logit_rules and "grammar" in logit_rules:
        raise ApiError(
            f"{found.field} and logit_rules.grammar exclude each other: send one of them",
            param="logit_rules",
            code=INVALID_GRAMMAR,
        )
    if ignore_eos:
        raise ApiError(
            f"ignore_eos: an answer by {found.field} ends where it is complete: leave "
            "ignore_eos out",
            param="ignore_eos",
            code=INVALID_GRAMMAR,
        )
    return found


def sampling_of(
    request: RequestForm,
    defaults: Mapping[str, Any],
    rules: Mapping[str, Any] | None,
    **values: Any,
) -> SamplingParams:
    """Makes SamplingParams from the request's fields of the same name and meaning.

    - What was not given comes from `defaults`, or else from SamplingParams' own defaults.
    - `rules` are further logit rules, by name.
    - `values` are SamplingParams that the request has by another name; None: not given.

    Raises ApiError naming the parameter.
    """
    names = set(SamplingParams.__struct_fields__)
    shared: dict[str, Any] = {
        name: getattr(request, name) for name in request.__struct_fields__ if name in names
    }
    own = shared.get("logit_rules") or {}
    for name in rules or ():
        if name in own:
            raise ApiError(
                f"logit_rules.{name} and {name} are the same: send one of them",
                param="logit_rules",
            )
    if rules:
        shared["logit_rules"] = {**own, **rules}
    given = {name: value for name, value in {**shared, **values}.items() if value is not None}
    try:
        return SamplingParams(**{**defaults, **given})
    except ValueError as error:
        for name in rules or ():  # which the request gave as a field of that name
            of_rule = f"logit_rules: {name} "
            if str(error).startswith(of_rule):
                raise ApiError(str(error).removeprefix("logit_rules: "), param=name) from error
        raise value_error(error, SamplingParams.__struct_fields__) from error
