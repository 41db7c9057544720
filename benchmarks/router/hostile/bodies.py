"""Hostile bodies that are not JSON, or nearly not."""

from benchmarks.router.hostile.sending import (
    COMPLETIONS,
    MB,
    Attack,
    chats,
    completion_body,
    post_of,
    row,
    sending_all,
    text_of,
)


@row("bad-utf8", "31 MB whose end is not UTF-8")
def _bad_utf8() -> Attack:
    text = text_of(31 * MB).encode()
    return sending_all([post_of(COMPLETIONS, b'{"model":"x","prompt":"' + text[:-10] + b'\xff"}')])


@row("digits-8mb", "a seed of 8,000,000 digits")
def _digits() -> Attack:
    return sending_all(
        [
            post_of(
                COMPLETIONS,
                completion_body(prompt=[5, 6], seed=4242).replace(b"4242", b"7" * (8 * MB)),
            )
        ]
    )


@row("digits-5000", "a priority of 5,000 digits")
def _priority() -> Attack:
    return sending_all(
        [
            post_of(
                COMPLETIONS,
                completion_body(prompt=[5, 6], priority=4242).replace(b"4242", b"7" * 5000),
            )
        ]
    )


@row("infinity", "temperature 1e400")
def _infinity() -> Attack:
    return sending_all(
        [
            post_of(
                COMPLETIONS,
                completion_body(prompt=[5, 6], temperature=4242).replace(b"4242", b"1e400"),
            )
        ]
    )


@row("spaces-31mb", "31 MB of spaces before the JSON")
def _spaces() -> Attack:
    return sending_all(
        [post_of(COMPLETIONS, b" " * (31 * MB) + completion_body(prompt=[5, 6], max_tokens=4))]
    )


@row("schema-8mb", "a response_format of 8 MB")
def _schema() -> Attack:
    schema = {
        "type": "json_schema",
        "json_schema": {f"p{i}": {"type": "string"} for i in range(250_000)},
    }
    return chats(response_format=schema)
