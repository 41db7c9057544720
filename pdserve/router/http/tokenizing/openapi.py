"""Describes the tokenizer's endpoints and the pages about the server for the OpenAPI document.

Called by `router.http.openapi.document`.
"""

from pdserve.router.http.openai.openapi_chat import chat_limits
from pdserve.router.http.openapi.schemas import INTEGER, STRING, Json, object_of
from pdserve.router.http.request_form import RequestForm
from pdserve.router.http.tokenizing.requests import DetokenizeRequest, TokenizeRequest
from pdserve.router.request.prompts import MAX_ENCODED_CHARS


def tokenizing_limits() -> dict[type[RequestForm], dict[str, Json]]:
    """Returns the limits of these requests' values, besides their types."""
    chat = chat_limits()
    return {
        TokenizeRequest: {
            "prompt": {"anyOf": [STRING | {"maxLength": MAX_ENCODED_CHARS}]},
            **{name: chat[name] for name in ("messages", "tools", "documents")},
        },
        DetokenizeRequest: {"tokens": {"items": INTEGER | {"minimum": 0}}},
    }


def tokenizing_answers() -> dict[str, Json]:
    """Returns the answers, by their names among the schemas."""
    or_null = {"type": ["integer", "null"]}
    ids = {"type": "array", "items": INTEGER}
    texts = {"type": ["array", "null"], "items": STRING}
    text_or_null = {"type": ["string", "null"]}
    return {
        "Tokens": object_of(count=INTEGER, max_model_len=or_null, tokens=ids, token_strs=texts),
        "Text": object_of(prompt=STRING),
        "TokenizerInfo": object_of(
            tokenizer_class=STRING,
            eos_token=text_or_null,
            bos_token=text_or_null,
            chat_template=text_or_null,
            model_max_length=or_null,
        ),
        "Version": object_of(version=STRING),
        "Load": object_of(server_load=INTEGER),
    }
