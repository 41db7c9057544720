"""A turn at a router: checked, rendered, its rules made, and admitted.

The neutral way in for every dialect: a Turn and sampling parameters go in, a Generation comes out
whose chunks hold pieces (reasoning, content, calls). Knows no API's form and no HTTP. Called by
the dialects of `router.http` and by the Python handle.
"""

import asyncio
import re
from typing import Any

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.request.generation import Generation
from pdserve.router.request.request_checks import Names
from pdserve.router.request.service import Service
from pdserve.text.grammars.structured import StructuredRequest
from pdserve.text.grammars.tools import unenforced_in_tools
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
    """As `Service.admit`, for the next answer of a conversation; options: the same. sampling: None
    takes the model's defaults, and as many tokens as fit, where it has no max_new_tokens. form:
    what the content must look like, after the reasoning; None: any text, or what
    `sampling.logit_rules` says of the whole answer. names: what errors call fields; messages are
    always "messages". Raises ApiError."""
    turns = service.turns
    has_engine = _has_engine(service)
    check_turn(service, turn)
    try:
        if form is not None:
            turns.check_form(turn, form.field, sampling.logit_rules if sampling else None)
        if sampling is None:
            options["open_ended"] = True
            defaults = {"max_tokens": None, **service.sampling_defaults}
            sampling = SamplingParams.from_defaults(defaults)
        cuts = options.get("truncate_prompt_tokens") is not None
        prompt = await service.chat_prompt(turn, may_be_long=cuts)
        own = sampling.logit_rules
        if form is not None:
            calls = await asyncio.to_thread(turns.call_rules, turn, prompt) if turn.tools else ()
            prefix = turns.prefix(turn, prompt)
            found = await service.rules(form, prefix=prefix, call_rules=calls)
            options["unenforced"] = found.unenforced
            rules = turns.budget_rules(turn, prompt) | found.settings
        elif has_engine and turn.tools:  # whose grammar may take milliseconds
            rules = await asyncio.to_thread(turns.rules, turn, prompt, has_engine, own)
        else:
            rules = turns.rules(turn, prompt, has_engine, own)
        if form is None and RULE in rules:  # a schema of a tool may be as hostile as any
            text = rules[RULE]
            checked = await service.tool_rules(
                lambda: text, sorted(unenforced_in_tools(turn.tools))
            )
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


def check_turn(service: Service, turn: Turn) -> None:
    """Raises ApiError (400) when the model cannot do it."""
    try:
        service.turns.check(turn, _has_engine(service))
    except ValueError as error:
        raise turn_error(error) from error


def _has_engine(service: Service) -> bool:
    """Whether some worker enforces grammars where answers are generated."""
    return any(worker.enforces_grammars for worker in service.fleet.decode_workers)


def turn_error(error: ValueError) -> ApiError:
    """An ApiError (400) for a ValueError of `turns`, whose message begins with the field, as in
    tools[0].function.name."""
    found = re.match(r"[a-z_]+", str(error))
    return ApiError(str(error), param=found[0] if found else None)
