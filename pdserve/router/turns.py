"""Admits a turn at a router: checks it, renders its prompt, and makes its rules.

Every dialect enters here, in no API's form: a Turn and sampling parameters go in, and a Generation
comes out whose chunks hold pieces (reasoning, content, calls). Knows no HTTP. Called by the
dialects of `router.http` and by the Python handle.
"""

import asyncio
import re
from functools import partial
from typing import Any

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import INVALID_GRAMMAR, ApiError
from pdserve.router.request.generation import Generation
from pdserve.router.request.request_checks import Names
from pdserve.router.request.service import Service
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.turns.enforcement import RULE
from pdserve.turns.turn import Turn

CHAT_NAMES = Names(prompt="messages")


async def admit_turn(
    service: Service,
    turn: Turn,
    sampling: SamplingParams | None,
    form: StructuredRequest | None = None,
    names: Names = CHAT_NAMES,
    **options: Any,
) -> Generation:
    """Admits the next answer of a conversation; `options` are those of `Service.admit`.

    If `sampling` is None, the model's defaults hold, and without max_new_tokens in them the answer
    gets as many tokens as fit. `form` describes the content after the reasoning; None allows any
    text, or what `sampling.logit_rules` demand of the whole answer. `names` are the names that
    errors use for fields; messages are always "messages". Raises ApiError.
    """
    turns = service.turns
    has_engine = _has_engine(service)
    check_turn(service, turn, form, sampling)
    try:
        if sampling is None:
            options["open_ended"] = True
            defaults = {"max_tokens": None, **service.sampling_defaults}
            sampling = SamplingParams.from_defaults(defaults)
        if turn.must_call and sampling.ignore_eos:
            raise ApiError(
                "ignore_eos: an answer that must be a call ends where its calls are complete: "
                "leave ignore_eos out",
                param="ignore_eos",
                code=INVALID_GRAMMAR,
            )
        cuts = options.get("truncate_prompt_tokens") is not None
        prompt = await service.chat_prompt(turn, may_be_long=cuts)
        own = sampling.logit_rules
        parts = partial(turns.call_parts, turn)
        if form is not None:
            calls = await asyncio.to_thread(turns.call_rules, turn, prompt) if turn.tools else ()
            prefix = turns.prefix(turn, prompt)
            found = await service.rules(
                form, prefix=prefix, call_rules=calls, parts=parts if calls else None
            )
            options["unenforced"] = found.unenforced
            rules = turns.budget_rules(turn, prompt) | found.settings
        elif has_engine and turn.tools:  # the tools' grammar may take milliseconds
            rules = await asyncio.to_thread(turns.rules, turn, prompt, has_engine, own)
        else:
            rules = turns.rules(turn, prompt, has_engine, own)
        if form is None and RULE in rules:  # a tool's schema may be as hostile as any other
            checked = await service.tool_rules(rules[RULE], parts)
            rules |= checked.settings
            options["unenforced"] = checked.unenforced
        sampling = sampling.with_rules(rules) if rules else sampling
    except ValueError as error:
        raise turn_error(error) from error
    return await service.admit(
        [prompt],
        sampling,
        add_special_tokens=False,
        names=names,
        reading=turns.reading(turn, prompt),
        **options,
    )


def check_turn(
    service: Service,
    turn: Turn,
    form: StructuredRequest | None = None,
    sampling: SamplingParams | None = None,
) -> None:
    """Raises ApiError (400) if the model cannot do it, or if its answer cannot have the form."""
    try:
        service.turns.check(turn, _has_engine(service))
        if form is not None:
            service.turns.check_form(turn, form.field, sampling.logit_rules if sampling else None)
    except ValueError as error:
        raise turn_error(error) from error


def _has_engine(service: Service) -> bool:
    """True if some worker that decodes enforces grammars."""
    return any(worker.enforces_grammars for worker in service.fleet.decode_workers)


def turn_error(error: ValueError) -> ApiError:
    """Returns an ApiError (400) for a ValueError of `turns`, whose message begins with the field,
    for example tools[0].function.name."""
    found = re.match(r"[a-z_]+", str(error))
    return ApiError(str(error), param=found[0] if found else None)
