"""Turns bodies of requests into checked request objects; long bodies are parsed piece by piece.

It takes every field that the kind of request has (`router.http.request_form`). Any other field is
refused with its name and a cure, unless it is null, has the value that changes nothing, or asks
nothing of a model (user, metadata ...). Knows no workers and no HTTP framework. Called by
`router.http.calls`.
"""

import difflib
import re
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.logit_rules import RULES
from pdserve.router.errors import ApiError
from pdserve.router.http.json_outline import PIECE_BYTES, Member, arrays, least_chars, outline
from pdserve.router.http.request_form import RequestForm
from pdserve.router.request.prompts import Lengths, SharedIds

R = TypeVar("R", bound=RequestForm)

LONG_BODY = 1 << 15  # bytes; a shorter body is decoded in about a millisecond, whatever it holds
MAX_OTHER_BYTES = 1 << 20  # size of a value that is neither prompt nor messages
MAX_ITEMS = 1 << 17  # texts, lists, objects and commas in such a value, and in messages
MAX_PROMPTS = 1 << 14
# Bytes of JSON. A longer prompt is checked alone before it is decoded.
LONG_ITEM = 2 * PIECE_BYTES
# Characters of each text, list or object shown to the model that may be missing in the prompt:
# names and spaces.
ITEM_CHARS = 256
LONGEST_TYPO = 64
NEAR = 0.8  # least similarity (difflib's ratio) of a name to the one that was probably meant
LONGEST_PLACE = 400


def parse(body: bytes | bytearray, kind: type[R]) -> R:
    """Parses a short body at once. Raises ApiError (400) naming the parameter."""
    data = _decoded(body)
    if not isinstance(data, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return _checked(data, kind)


async def parse_long(body: bytearray, kind: type[R], lengths: Lengths, pace: Pace) -> R:
    """Does the same for a long body, piece by piece.

    A prompt or a conversation that cannot fit is refused before it is decoded.
    """
    members = await outline(body, pace)
    if not kind.fits_context:
        lengths = lengths.unbounded
    if "truncate_prompt_tokens" in members and kind.cuts_prompts:
        found = members["truncate_prompt_tokens"]
        if body[found.start : found.end] != b"null":
            lengths = lengths.unbounded  # a prompt that is too long will be cut
    prompt: str | list[Any] | None = None
    data: dict[str, Any] = {}
    for name, member in members.items():
        if pace.is_due:
            await pace.rest()
        if name == kind.prompt_field:
            data[name] = prompt = await _long_prompt(body, member, name, lengths, pace)
            continue
        await _check_size(body, name, member, lengths, pace, name in kind.shown_fields)
        data[name] = _decoded(body[member.start : member.end])
    if not isinstance(prompt, list):
        return _checked(data, kind)
    call = _checked(data | {kind.prompt_field: []}, kind)  # its items were checked piece by piece
    setattr(call, kind.prompt_field, prompt)
    return call


async def _check_size(
    body: bytearray, name: str, member: Member, lengths: Lengths, pace: Pace, is_shown: bool
) -> None:
    if is_shown:
        chars = await least_chars(body, member, pace)
        lengths.check_chars(max(0, chars - ITEM_CHARS * member.num_values), name)
    elif member.end - member.start > MAX_OTHER_BYTES:
        message = (
            f"{name} takes {member.end - member.start} bytes of the body, more than "
            f"{MAX_OTHER_BYTES}: shorten it"
        )
        raise ApiError(message, param=name, code="too_long")
    if member.num_values + member.num_commas > MAX_ITEMS:
        message = f"{name} holds more than {MAX_ITEMS} values: send less in a request"
        raise ApiError(message, param=name, code="too_many_values")


async def _long_prompt(
    body: bytearray, member: Member, named: str, lengths: Lengths, pace: Pace
) -> str | list[Any] | None:
    first = bytes(body[member.start : member.start + 1])
    if first == b'"':
        await _check_text(body, member, named, lengths, pace)
    if first != b"[":
        return cast("str | None", _decoded(body[member.start : member.end]))
    if member.num_values == 1:
        lengths.check(member.num_commas + 1, named)
    elif len(member.ends) > MAX_PROMPTS:
        message = (
            f"{named} holds {len(member.ends)} prompts, more than {MAX_PROMPTS}: spread them over "
            "several requests"
        )
        raise ApiError(message, param=named, code="too_many_prompts")
    kind = _kind_of_prompts(body, member)
    prompts: list[Any] = []
    for items in arrays(body, member):
        if len(items) > LONG_ITEM:  # one item
            if kind == list[str]:
                await _check_text(items, Member(0, len(items)), named, lengths, pace)
            else:
                lengths.check(items.count(b",") + 1, named)
                if (item := _flat_item(items)) is not None:
                    prompts.append(await _long_ids(items, item, named, lengths, pace))
                    continue
        decoded = _items(items, kind, named)
        if kind == list[list[int]]:
            decoded = [_shared(ids, named, lengths) for ids in decoded]
        elif kind == list[int]:
            decoded = lengths.shared_ids(decoded, named)
        prompts += decoded
        if pace.is_due:
            await pace.rest()
    return [_shared_already(prompts, lengths)] if kind == list[int] and prompts else prompts


def _flat_item(items: bytearray) -> Member | None:
    """Returns the only item of an array of arrays, if it holds nothing but numbers.

    Such an item may be cut at any comma.
    """
    start = items.find(b"[", 1)
    end = items.rfind(b"]", 0, -1) + 1
    is_alone = 0 < start < end and not (items[1:start] + items[end:-1]).strip()
    is_flat = items.count(b"[") == 2 and not any(mark in items for mark in (b'"', b"{"))
    return Member(start, end) if is_alone and is_flat else None


async def _long_ids(
    body: bytearray, member: Member, named: str, lengths: Lengths, pace: Pace
) -> SharedIds:
    """Decodes one long prompt, piece by piece."""
    ids: list[int] = []
    for items in arrays(body, member):
        ids += lengths.shared_ids(_items(items, list[int], named), named)
        if pace.is_due:
            await pace.rest()
    return _shared_already(ids, lengths)


def _shared(ids: Sequence[int], named: str, lengths: Lengths) -> SharedIds:
    return _shared_already(lengths.shared_ids(ids, named), lengths)


def _shared_already(ids: Sequence[int], lengths: Lengths) -> SharedIds:
    return SharedIds(tuple(ids), lengths.limits.vocab_size)


def _items(items: bytearray, kind: Any, named: str) -> Any:
    try:
        return msgspec.json.decode(items, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(f"{named}: {str(error).split(' - at ')[0]}", param=named) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(error) from error


async def _check_text(
    body: bytearray, member: Member, named: str, lengths: Lengths, pace: Pace
) -> None:
    if member.end - member.start > lengths.max_chars:
        lengths.check_chars(await least_chars(body, member, pace), named)


def _kind_of_prompts(body: bytearray, member: Member) -> Any:
    first = body[member.start + 1 : member.start + PIECE_BYTES].lstrip()[:1]
    return list[str] if first == b'"' else list[list[int]] if first == b"[" else list[int]


def _decoded(data: bytes | bytearray) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from error


def _not_json(error: Exception) -> ApiError:
    return ApiError(f"the body is not valid JSON: {error}", code="invalid_json")


def _checked(data: dict[str, Any], kind: type[R]) -> R:
    given = {name: _whole(value) for name, value in data.items() if value is not None}
    for rule, row in RULES.items():
        if row.field in given and row.field not in kind.__struct_fields__:
            asked = given.get("logit_rules", {})
            settings = given.pop(row.field)
            if not isinstance(asked, dict) or rule in asked:
                raise ApiError(f"{row.field} and logit_rules.{rule} are the same: send one of them")
            given["logit_rules"] = asked | {rule: settings}
    for name in given.keys() - kind.__struct_fields__ - kind.ignored:
        value = given.pop(name)
        if not any(_same(value, neutral) for neutral in kind.neutral.get(name, ())):
            raise ApiError(_unknown(name, kind), param=name, code="unsupported_parameter")
    if "logit_bias" in kind.__struct_fields__:
        _check_bias(given.get("logit_bias"))
    try:
        return msgspec.convert(given, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _check_bias(given: Any) -> None:
    """Raises ApiError (400) naming the key, if a member cannot be a bias."""
    for key, value in given.items() if isinstance(given, dict) else ():
        if not (key.isascii() and key.isdecimal()):
            raise ApiError(
                f"logit_bias has the key {key!r:.80}: a key must be a token id, such as '5'",
                param="logit_bias",
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ApiError(
                f"logit_bias[{key:.80}] must be a number in [-100, 100], not {value!r:.80}",
                param="logit_bias",
            )


def _same(value: Any, neutral: Any) -> bool:
    """Compares two values, but true is not 1 in JSON, nor false 0."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _whole(value: Any) -> Any:
    """Makes 2.0 an integer, because JSON has only one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _unknown(name: str, kind: type[RequestForm]) -> str:
    if name in kind.cures:
        return f"{name} is not supported: {kind.cures[name]}"
    names = kind.__struct_fields__ if len(name) <= LONGEST_TYPO else ()
    near = difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
    return f"{name} is not supported: " + (f"did you mean {near[0]}?" if near else "remove it")


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Returns an ApiError for an error of msgspec.

    msgspec's message ends with the place ("Expected `int`, got `str` - at `$.max_tokens`"), or
    names the missing field. The part before the place may repeat what was sent.
    """
    what, _, where = str(error).rpartition(" - at ")
    place = re.search(r"`\$\.(\w+)", where[:LONGEST_PLACE]) or re.search(
        r"required field `(\w+)`", where[:LONGEST_PLACE]
    )
    param = place.group(1) if place else None
    message = what or where
    return ApiError(f"{param}: {message}" if param else message, param=param)
