"""Describes the answers of OpenAI's paths, and the answers that all dialects share.

Called by `router.http.openapi.document`.
"""

from pdserve.router.http.openai.openapi_chat import chat_answers
from pdserve.router.http.openapi.schemas import INTEGER, NULL, STRING, Json, list_of, object_of, ref
from pdserve.router.http.responses.openapi import responses_answers


def openai_answers() -> dict[str, Json]:
    """Returns the answers, as far as clients rely on them."""
    reason = {"enum": ["stop", "length", None]}
    chat_reason = {"enum": ["stop", "length", "tool_calls", None]}
    usage = object_of(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
    head = {"id": STRING, "created": INTEGER, "model": STRING, "usage": usage}
    choice = object_of(index=INTEGER, text=STRING, finish_reason=reason)
    message = ref("ChatMessage")
    chat_choice = object_of(index=INTEGER, message=message, finish_reason=chat_reason)
    text_or_null = {"type": ["string", "null"]}
    error = object_of(message=STRING, type=STRING, param=text_or_null, code=text_or_null)
    return {
        **chat_answers(),
        **responses_answers(),
        "Completion": object_of(
            object={"const": "text_completion"}, choices=list_of(choice), **head
        ),
        "ChatCompletion": object_of(
            object={"const": "chat.completion"}, choices=list_of(chat_choice), **head
        ),
        "Model": object_of(
            id=STRING,
            object={"const": "model"},
            created=INTEGER,
            owned_by=STRING,
            root=STRING,
            parent=NULL,
            max_model_len={"type": ["integer", "null"]},
        ),
        "ModelList": object_of(object={"const": "list"}, data=list_of(ref("Model"))),
        "Readiness": object_of(
            ready={"type": "boolean"},
            prefill=INTEGER,
            decode=INTEGER,
            both=INTEGER,
            missing=list_of(STRING),
        ),
        "Error": object_of(error=error),
    }
