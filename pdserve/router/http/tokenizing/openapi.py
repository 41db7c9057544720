"""What the OpenAPI document says of the tokenizer's endpoints and of the pages about the server.

Called by `router.http.openapi.document`.
"""

from typing import Any

from pdserve.router.http.openai.openapi_chat import chat_limits
from pdserve.router.http.request_form import RequestForm
from pdserve.router.http.tokenizing.requests import DetokenizeRequest, TokenizeRequest
from pdserve.router.request.prompts import MAX_ENCODED_CHARS

Json = dict[str, Any]

_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}


def tokenizing_limits() -> dict[type[RequestForm], dict[str, Json]]:
    """What a value of these requests must be, besides its type."""
    chat = chat_limits()
    return {
        TokenizeRequest: {
            "prompt": {"anyOf": [_STRING | {"maxLength": MAX_ENCODED_CHARS}]},
            **{name: chat[name] for name in ("messages", "tools", "documents")},
        },
        DetokenizeRequest: {"tokens": {"items": _INTEGER | {"minimum": 0}}},
    }


def tokenizing_answers() -> dict[str, Json]:
    """The answers, by their names among the schemas."""
    or_null = {"type": ["integer", "null"]}
    ids = {"type": "array", "items": _INTEGER}
    texts = {"type": ["array", "null"], "items": _STRING}
    text_or_null = {"type": ["string", "null"]}
    return {
        "Tokens": _object(count=_INTEGER, max_model_len=or_null, tokens=ids, token_strs=texts),
        "Text": _object(prompt=_STRING),
        "TokenizerInfo": _object(
            tokenizer_class=_STRING,
            eos_token=text_or_null,
            bos_token=text_or_null,
            chat_template=text_or_null,
            model_max_length=or_null,
        ),
        "Version": _object(version=_STRING),
        "Load": _object(server_load=_INTEGER),
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}
