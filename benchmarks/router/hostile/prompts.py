"""Hostile prompts that are long, many, or made of many small parts."""

from benchmarks.router.hostile.sending import (
    CHAT,
    COMPLETIONS,
    LONGEST,
    MB,
    Attack,
    chats,
    completes,
    completion_body,
    ids_of,
    leaving,
    post_of,
    prompt_of,
    raw_body,
    row,
    sending_all,
    short_ids,
    text_of,
)

# Long texts.


@row("chat-10mb", "one chat of 10 MB")
def _chat_10mb() -> Attack:
    return chats(messages=[{"role": "user", "content": text_of(10 * MB)}])


@row("chat-31mb", "one chat of 31 MB", limit_s=60.0)
def _chat_31mb() -> Attack:
    return chats(messages=[{"role": "user", "content": text_of(31 * MB)}])


@row("chat-31mb-x8", "8 chats of 31 MB at once", limit_s=60.0)
def _chat_31mb_x8() -> Attack:
    return chats(copies=8, messages=[{"role": "user", "content": text_of(31 * MB)}])


@row("text-31mb", "one completion of 31 MB")
def _text_31mb() -> Attack:
    return completes(prompt=text_of(31 * MB), max_tokens=4)


@row(
    "text-16mb",
    "one completion of 16 MB: characters that could just be within the context",
    limit_s=60.0,
)
def _text_16mb() -> Attack:
    return completes(prompt=text_of(16 * MB), max_tokens=4)


@row("texts-2000", "2,000 texts of 4,000 characters", limit_s=60.0)
def _texts_2000() -> Attack:
    return completes(
        prompt=[text_of(8 * MB)[i * 4000 : (i + 1) * 4000] for i in range(2000)], max_tokens=2
    )


@row("texts-x30", "30 times 200 texts of 4,000 characters at once", limit_s=60.0)
def _texts_x30() -> Attack:
    text = text_of(8 * MB)
    return completes(
        copies=30, prompt=[text[i * 4000 : (i + 1) * 4000] for i in range(200)], max_tokens=2
    )


@row("posts-500", "500 completions of 4,000 characters at once", wanted="answered")
def _posts_500() -> Attack:
    text = text_of(8 * MB)
    bodies = [
        completion_body(prompt=text[i * 4000 : (i + 1) * 4000], max_tokens=2) for i in range(500)
    ]
    return sending_all([post_of(COMPLETIONS, body) for body in bodies])


@row("long-prompt", "a prompt of 128k tokens that fits", wanted="answered", limit_s=60.0)
def _long_prompt() -> Attack:
    return completes(prompt=prompt_of(LONGEST), max_tokens=4)


@row(
    "long-prompts-x16",
    "16 prompts of 128k tokens that fit, at once",
    wanted="answered",
    limit_s=60.0,
)
def _long_prompts() -> Attack:
    return completes(copies=16, prompt=prompt_of(LONGEST), max_tokens=4)


@row("long-chat", "a chat of 128k tokens that fits", wanted="answered", limit_s=60.0)
def _long_chat() -> Attack:
    return chats(messages=[{"role": "user", "content": prompt_of(LONGEST)}], max_tokens=4)


@row("one-word-16mb", "one word of 16 MB", limit_s=60.0)
def _one_word() -> Attack:
    return completes(prompt="a" * (16 * MB), max_tokens=4)


@row("emoji-30mb", "30 MB of characters that are four bytes each", limit_s=60.0)
def _emoji() -> Attack:
    body = completion_body(messages=[{"role": "user", "content": "@"}])
    return sending_all([post_of(CHAT, body.replace(b"@", "\U0001f642".encode() * 7_500_000))])


# Many small parts in one body.


@row("messages-100k", "a chat of 100,000 messages")
def _messages() -> Attack:
    return chats(messages=[{"role": "user", "content": "Hi"}] * 100_000)


@row("parts-100k", "a message of 100,000 parts")
def _parts() -> Attack:
    return chats(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 100_000}])


@row("parts-1m", "a message of 1,000,000 parts, 27 MB", limit_s=60.0)
def _many_parts() -> Attack:
    before = '{"model":MODEL,"max_tokens":4,"messages":[{"role":"user","content":['
    return raw_body(CHAT, before, '{"type":"text","text":"H"}', MB, "]}]}")


@row("tool-calls-20mb", "a tool call whose arguments are 20 MB of JSON in a string", limit_s=60.0)
def _tool_calls() -> Attack:
    call = {
        "type": "function",
        "id": "a",
        "function": {"name": "f", "arguments": "[" + "[]," * 7 * MB + "[]]"},
    }
    return chats(
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    )


@row("tool-call-12mb", "a tool call whose arguments are one word of 12 MB", limit_s=60.0)
def _tool_call() -> Attack:
    call = {
        "type": "function",
        "id": "a",
        "function": {"name": "f", "arguments": '"' + "a" * (12 * MB) + '"'},
    }
    return chats(
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    )


@row("tools-8mb", "tools of 8 MB, shown to a template that ignores them")
def _tools() -> Attack:
    return chats(
        tools=[{"type": "function", "function": {"name": "f" * 80}}] * 65_000, tool_choice="none"
    )


@row("template-8mb", "chat_template_kwargs of 8 MB")
def _template() -> Attack:
    return chats(chat_template_kwargs={f"key{i}": "x" * 80 for i in range(80_000)})


@row("prompts-8000", "8,000 prompts of two ids", limit_s=60.0)
def _prompts_8000() -> Attack:
    return completes(prompt=[[5, 6]] * 8000, max_tokens=2)


@row("prompts-8000-left", "8,000 prompts of two ids, whose client leaves at once", limit_s=60.0)
def _prompts_left() -> Attack:
    pieces = post_of(
        COMPLETIONS, completion_body(prompt=[[5, 6]] * 8000, max_tokens=1000, stream=True)
    )

    return leaving(1, pieces, 1)


@row("prompts-1m", "1,000,000 prompts of no ids")
def _prompts_1m() -> Attack:
    return raw_body(COMPLETIONS, '{"model":MODEL,"prompt":[', "[]", MB, "]}")


@row("choices-8192", "64 choices of 128 prompts, 1 token each", limit_s=60.0)
def _choices() -> Attack:
    return completes(prompt=[[5, 6]] * 128, n=64, max_tokens=1)


@row("timelines-3000", "the timelines of 3,000 prompts", limit_s=60.0)
def _timelines() -> Attack:
    body = completion_body(prompt=[[300, 301, 302]] * 3000, max_tokens=1)
    return sending_all([post_of(COMPLETIONS, body, "x-pdserve-timeline: 1")])


# Prompts as lists.


@row("ids-7m", "a prompt of 7,000,000 ids", limit_s=60.0)
def _one_of_ids() -> Attack:
    return raw_body(
        COMPLETIONS, '{"model":MODEL,"max_tokens":4,"prompt":[', short_ids(1000), 7000, "]}"
    )


@row("ids-8000x1000", "8,000 prompts of 1,000 ids", limit_s=60.0)
def _prompts_of_ids() -> Attack:
    before = '{"model":MODEL,"max_tokens":1,"prompt":['
    return raw_body(COMPLETIONS, before, f"[{short_ids(1000)}]", 8000, "]}")


@row("ids-64x125000", "64 prompts of 125,000 ids", limit_s=60.0)
def _long_prompts_of_ids() -> Attack:
    return raw_body(
        COMPLETIONS, '{"model":MODEL,"max_tokens":1,"prompt":[', f"[{short_ids(125_000)}]", 64, "]}"
    )


@row("ids-128k-x16", "16 prompts of 128k ids that fit, at once", wanted="answered")
def _ids_128k() -> Attack:
    return completes(copies=16, prompt=ids_of(LONGEST), max_tokens=4)


@row("floats-1m", "a prompt of 1,000,000 floats")
def _floats() -> Attack:
    return raw_body(COMPLETIONS, '{"model":MODEL,"prompt":[', "1.5", MB, "]}")


@row("lists-10m", "a prompt of 10,000,000 empty lists", limit_s=60.0)
def _lists() -> Attack:
    return raw_body(COMPLETIONS, '{"model":MODEL,"prompt":[', "[]", 10 * MB, "]}")


@row("objects-10m", "metadata of 10,000,000 empty objects, which nobody reads", limit_s=60.0)
def _objects() -> Attack:
    return raw_body(
        COMPLETIONS,
        '{"model":MODEL,"prompt":[5,6],"max_tokens":4,"metadata":[',
        "{}",
        10 * MB,
        "]}",
    )


@row("nested-lists", "a prompt of lists in lists in lists")
def _nested_prompt() -> Attack:
    return raw_body(COMPLETIONS, '{"model":MODEL,"prompt":[', "[[[1],[2]],[[3]]]", 500_000, "]}")


@row("nested-1m", "1,000,000 brackets that open")
def _nested() -> Attack:
    return sending_all([post_of(COMPLETIONS, b"[" * MB)])
